#!/usr/bin/env bash
# Makes sure that Spark will find a Java of 17 or newer. Where we may install packages (root, or CI) it installs one;
# elsewhere it says in one line what to do. Spark looks at JAVA_HOME first and at PATH only without it: so do we.
set -euo pipefail

readonly JAVA_MIN=17

java_major() { # prints the major version of the java binary "$1"; fails when it does not run
    local text version
    text=$("$1" -version 2>&1) || return 1
    version=$(sed -n 's/.*version "\([^"]*\)".*/\1/p' <<<"$text" | head -n 1)
    version=${version#1.} # before Java 9: 1.8.0_292
    [[ $version =~ ^[0-9]+ ]] && echo "${BASH_REMATCH[0]}"
}

found_java() { # the binary Spark would take
    if [[ -n ${JAVA_HOME:-} ]]; then
        echo "$JAVA_HOME/bin/java"
    else
        command -v java || true
    fi
}

good_java() {
    local java major
    java=$(found_java)
    [[ -n $java && -x $java ]] && major=$(java_major "$java") && ((major >= JAVA_MIN))
}

install_java() { # only where nobody is surprised by it
    local sudo=()
    command -v apt-get >/dev/null || return 1
    if [[ $(id -u) != 0 ]]; then
        [[ ${CI:-} == true ]] && command -v sudo >/dev/null || return 1
        sudo=(sudo -n)
    fi
    echo "java: none of $JAVA_MIN or newer found; installing openjdk-17-jre-headless"
    # Some images lack the folder that the Java packages' post-install step links manual pages into.
    "${sudo[@]}" mkdir -p /usr/share/man/man1
    "${sudo[@]}" apt-get update -qq || return 1
    DEBIAN_FRONTEND=noninteractive "${sudo[@]}" apt-get install -y -qq --no-install-recommends openjdk-17-jre-headless >/dev/null ||
        DEBIAN_FRONTEND=noninteractive "${sudo[@]}" apt-get install -y -qq --no-install-recommends default-jre-headless >/dev/null
}

good_java && exit 0

if [[ -n ${JAVA_HOME:-} ]] && ! [[ -x $JAVA_HOME/bin/java ]]; then
    echo "java: JAVA_HOME is $JAVA_HOME, which has no bin/java: unset it, or point it to a Java of $JAVA_MIN or newer." >&2
    exit 1
fi
if [[ -z ${JAVA_HOME:-} ]] && install_java && good_java; then
    exit 0
fi

java=$(found_java)
what="none found"
[[ -n $java ]] && what="$java is version $(java_major "$java" || echo unknown)"
echo "java: Spark needs Java $JAVA_MIN or newer ($what). Debian/Ubuntu: sudo apt-get install openjdk-17-jre-headless;" \
    "Fedora: sudo dnf install java-17-openjdk-headless; macOS: brew install openjdk@17, then set JAVA_HOME." >&2
exit 1
