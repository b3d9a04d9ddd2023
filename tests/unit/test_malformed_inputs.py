"""Two hundred malformed inputs of every format, each with its expected outcome.

A row of the table is an input and what becomes of it: the rows, the reasons of the dead letters in their order, or the
words of the error that stops the job. Each file is read in several cuts, which must all agree.
"""

from __future__ import annotations

import datetime as dt
import gzip
import http.client
import io
import json
import os
import socket
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock.connectors import SourceContext, files
from penstock.connectors.base import BadRecord
from penstock.connectors.push_http import HttpSource
from penstock.connectors.rows import polars_schema
from penstock.errors import PenstockError

NW = {"n": int, "w": str}
N8 = {"n": pl.Int8, "w": str}
FLOAT = {"f": float, "w": str}
F32 = {"f": pl.Float32}
BOOL = {"b": bool, "w": str}
DATE = {"d": dt.date, "w": str}
TIME = {"t": dt.datetime, "w": str}
LIST = {"l": list[int]}
BOM = b"\xef\xbb\xbf"
INT, QUOTES, FIELDS, UTF8, CR = "is not a", "misplaced quotes", "fields, expected", "not UTF-8", "carriage return"
DEEP = b"[" * 1030 + b"]" * 1030

Case = tuple[str, bytes, list[tuple[Any, ...]] | str, list[str]]
"""Name, content, the rows or the words of an error, the words of the dead letters' reasons."""


def stop(*words: str) -> str:
    return ".*".join(words)


CSV: list[tuple[dict[str, Any], list[Case]]] = [
    (
        {"schema": NW},
        [
            ("an empty file", b"", [], []),
            ("a header alone", b"n,w\n", [], []),
            ("a header without a line end", b"n,w", [], []),
            ("a BOM alone", BOM, [], []),
            ("a BOM and a header", BOM + b"n,w\n1,a\n", [(1, "a")], []),
            ("a BOM and a quoted header", BOM + b'"n","w"\n1,a\n', [(1, "a")], []),
            ("a BOM in the midst", b"n,w\n" + BOM + b"1,a\n2,b\n", [(2, "b")], ["byte order mark"]),
            ("no last line end", b"n,w\n1,a\n2,b", [(1, "a"), (2, "b")], []),
            ("CRLF", b"n,w\r\n1,a\r\n2,b\r\n", [(1, "a"), (2, "b")], []),
            ("CRLF and LF mixed", b"n,w\r\n1,a\n2,b\r\n", [(1, "a"), (2, "b")], []),
            ("LF and a last CR", b"n,w\n1,a\n2,b\r", [(1, "a"), (2, "b")], []),
            ("lone CR in a field", b"n,w\n1,a\rb\n2,b\n", [(2, "b")], [CR]),
            ("lone CR for all lines", b"n,w\r1,a\r2,b\r", stop("header", "line feed"), []),
            ("lone CR after the header", b"n,w\n1,a\r2,b\r3,c", [], [CR]),
            ("CR CR LF", b"n,w\n1,a\r\r\n2,b\n", [(2, "b")], [CR]),
            ("empty lines", b"n,w\n\n1,a\n\n\n2,b\n\n", [(1, "a"), (2, "b")], []),
            ("a line of blanks", b"n,w\n  \n1,a\n", [(1, "a")], [FIELDS]),
            ("empty lines before the header", b"\nn,w\n1,a\n", stop("header has no column"), []),
            ("a field too few", b"n,w\n1\n2,b\n", [(2, "b")], [FIELDS]),
            ("a field too many", b"n,w\n1,a,x\n2,b\n", [(2, "b")], [FIELDS]),
            ("a comma too many at the end", b"n,w\n1,a,\n", [], [FIELDS]),
            ("commas alone", b"n,w\n,\n,,\n", [(None, None)], [FIELDS]),
            ("a header twice", b"n,w\nn,w\n1,a\n", [(1, "a")], [INT]),
            ("a name twice", b"n,w,n\n1,a,2\n", stop("names a column twice"), []),
            ("a column missing", b"n,x\n1,a\n", stop("has no column 'w'"), []),
            ("columns in another order", b"w,x,n\na,?,1\n", [(1, "a")], []),
            ("blanks in the header", b" n , w \n1,a\n", [(1, "a")], []),
            ("a quoted line break", b'n,w\n6,"x\n7,evil\ny"\n8,b\n', [(6, "x\n7,evil\ny"), (8, "b")], []),
            ("a quoted CRLF", b'n,w\r\n6,"x\r\ny"\r\n8,b\r\n', [(6, "x\r\ny"), (8, "b")], []),
            ("a quoted lone CR", b'n,w\n6,"x\ry"\n8,b\n', [(6, "x\ry"), (8, "b")], []),
            ("a quoted comma", b'n,w\n1,"a,b"\n', [(1, "a,b")], []),
            ("doubled quotes", b'n,w\n1,"a""b"\n2,""""\n', [(1, 'a"b'), (2, '"')], []),
            ("an empty quoted field", b'n,w\n1,""\n2,\n', [(1, ""), (2, None)], []),
            ("a quoted number", b'n,w\n"1","a"\n', [(1, "a")], []),
            ("a line break in the header", b'n,"w\n",x\n1,a,b\n', [(1, "a")], []),
            ("a quote that is never closed", b'n,w\n1,a\n2,"b\n3,c\n4,d\n', [(1, "a")], [QUOTES]),
            ("a quote at the very end", b'n,w\n1,a\n2,"', [(1, "a")], [QUOTES]),
            ("a quote within a field", b'n,w\n1,a"b\n2,b\n', [(2, "b")], [QUOTES]),
            ("text after a quote", b'n,w\n1,"a"b\n2,b\n', [(2, "b")], [QUOTES]),
            ("text before a quote", b'n,w\n1, "a"\n2,b\n', [(2, "b")], [QUOTES]),
            ("a quote closed in the next line", b'n,w\n1,"a\n2,"b\n3,c\n', [(3, "c")], [QUOTES]),
            ("quotes of another kind", b"n,w\n1,'a,b'\n2,b\n", [(2, "b")], [FIELDS]),
            ("an escape with a backslash", b'n,w\n1,"a\\"b"\n2,b\n', [(2, "b")], [QUOTES]),
            ("latin-1", b"n,w\n1,\xe9\n2,b\n", [(2, "b")], [UTF8]),
            ("half a character", b"n,w\n1,\xc3\n2,b\n", [(2, "b")], [UTF8]),
            ("an overlong character", b"n,w\n1,\xc0\xaf\n2,b\n", [(2, "b")], [UTF8]),
            ("a surrogate", b"n,w\n1,\xed\xa0\x80\n2,b\n", [(2, "b")], [UTF8]),
            ("latin-1 in quotes over lines", b'n,w\n1,"\xe9\nx"\n2,b\n', [(2, "b")], [UTF8]),
            ("UTF-16, little end first", "n,w\n1,a\n".encode("utf-16"), stop("UTF-16"), []),
            ("UTF-16, big end first", b"\xfe\xff" + "n,w\n1,a\n".encode("utf-16-be"), stop("UTF-16"), []),
            ("UTF-16 without a BOM", "n,w\n1,a\n".encode("utf-16-le"), stop("header has no column"), []),
            ("a NUL in a string", b"n,w\n1,a\x00b\n", [(1, "a\x00b")], []),
            ("a NUL in a number", b"n,w\n1\x00,a\n2,b\n", [(2, "b")], [INT]),
            ("NULs alone", b"n,w\n\x00\x00\n2,b\n", [(2, "b")], [FIELDS]),
            ("a line separator of Unicode", "n,w\n1,a\u2028b\n".encode(), [(1, "a\u2028b")], []),
            ("a vertical tab", b"n,w\n1,a\x0bb\n", [(1, "a\x0bb")], []),
            ("no number", b"n,w\nx,a\n2,b\n", [(2, "b")], [INT]),
            ("a fraction for an integer", b"n,w\n1.0,a\n2,b\n", [(2, "b")], [INT]),
            ("a number beyond 64 bits", b"n,w\n9223372036854775808,a\n2,b\n", [(2, "b")], [INT]),
            ("the least 64-bit number", b"n,w\n-9223372036854775808,a\n", [(-(2**63), "a")], []),
            ("hexadecimal", b"n,w\n0x10,a\n", [], [INT]),
            ("underscores", b"n,w\n1_000,a\n", [], [INT]),
            ("thousands in quotes", b'n,w\n"1,000",a\n', [], [INT]),
            ("other digits", "n,w\n\u0665,a\n".encode(), [], [INT]),
            ("an exponent", b"n,w\n1e3,a\n", [], [INT]),
            ("blanks around a number", b"n,w\n 1 ,a\n", [(1, "a")], []),
            ("NaN for an integer", b"n,w\nNaN,a\n", [], [INT]),
            ("two bad values in a row", b"n,w\nx,a\ny,b\n", [], [INT, INT]),
            ("a record beyond the limit", b"n,w\n1," + b"x" * 16_000 + b"\n2,b\n", [(2, "b")], ["more than"]),
            ("a quoted record beyond the limit", b'n,w\n1,"' + b"x\n" * 8000 + b'"\n2,b\n', [(2, "b")], ["more than"]),
            ("a quote unclosed beyond the limit", b'n,w\n1,a\n2,"' + b"x\n" * 8000, [(1, "a")], ["more than"]),
            ("a comment", b"n,w\n#1,a\n", [], [INT]),
            ("another separator", b"n;w\n1;a\n", stop("header has no column"), []),
            ("JSON", b'{"n": 1}\n', stop("header has no column"), []),
        ],
    ),
    (
        {"schema": NW, "header": False, "separator": ";"},
        [
            ("semicolons", b"1;a\n2;b,c\n", [(1, "a"), (2, "b,c")], []),
            ("a quoted semicolon", b'1;"a;b"\n', [(1, "a;b")], []),
            ("commas for semicolons", b"1,a\n", [], [FIELDS]),
            ("a BOM without a header", BOM + b"1;a\n", [(1, "a")], []),
            ("a BOM and quotes without a header", BOM + b'1;"a\nb"\n2;c\n', [(1, "a\nb"), (2, "c")], []),
        ],
    ),
    (
        {"schema": {"w": str}},
        [
            ("one column, blanks", b"w\n \na\n", [(" ",), ("a",)], []),
            ("one column, an empty quoted field", b'w\n""\na\n', [("",), ("a",)], []),
            ("one column, line breaks alone", b'w\n"\n"\n"\n\n"\n', [("\n",), ("\n\n",)], []),
            ("one column, a comma", b"w\na,b\n", [], [FIELDS]),
        ],
    ),
    (
        {"schema": N8},
        [
            ("a number beyond 8 bits", b"n,w\n127,a\n128,b\n-129,c\n", [(127, "a")], ["Int8", "Int8"]),
            ("a sign", b"n,w\n+5,a\n--5,b\n", [(5, "a")], ["Int8"]),
        ],
    ),
    (
        {"schema": FLOAT},
        [
            ("a float beyond its range", b"f,w\n1e400,a\n-1e400,b\n1,c\n", [(1.0, "c")], ["too large", "too large"]),
            ("infinity by name", b"f,w\ninf,a\n-inf,b\n", [(float("inf"), "a"), (float("-inf"), "b")], []),
            ("a decimal comma", b'f,w\n"1,5",a\n', [], ["Float64"]),
            ("no float", b"f,w\nabc,a\n1.5.2,b\n", [], ["Float64", "Float64"]),
        ],
    ),
    ({"schema": F32}, [("a float beyond 32 bits", b"f\n1e39\n1e38\n", [(pytest.approx(1e38),)], ["too large"])]),
    (
        {"schema": BOOL},
        [
            ("yes for true", b"b,w\nyes,a\ntrue,b\n0,c\n", [(True, "b"), (False, "c")], ["Boolean"]),
            ("2 for true", b"b,w\n2,a\n", [], ["Boolean"]),
        ],
    ),
    (
        {"schema": DATE},
        [
            ("a day that never was", b"d,w\n2023-02-29,a\n2024-02-29,b\n", [(dt.date(2024, 2, 29), "b")], ["Date"]),
            ("a date of another form", b"d,w\n29.02.2024,a\n02/29/2024,b\n", [], ["Date", "Date"]),
        ],
    ),
    (
        {"schema": TIME},
        [
            ("an hour too late", b"t,w\n2024-01-01 24:00:00,a\n", [], ["Datetime"]),
            ("a number for a time", b"t,w\n1704067200,a\n", [], ["Datetime"]),
            ("a date for a time", b"t,w\n2024-01-01,a\n", [(dt.datetime(2024, 1, 1), "a")], []),
            ("words for a time", b"t,w\nnow,a\n", [], ["Datetime"]),
        ],
    ),
]

OBJECT, JSON = "not a JSON object", "not JSON"
JSONL: list[tuple[dict[str, Any], list[Case]]] = [
    (
        {"schema": NW},
        [
            ("an empty file", b"", [], []),
            ("a BOM", BOM + b'{"n":1}\n', [(1, None)], []),
            ("a BOM alone", BOM, [], []),
            ("no last line end", b'{"n":1}\n{"n":2}', [(1, None), (2, None)], []),
            ("CRLF", b'{"n":1}\r\n{"n":2}\r\n', [(1, None), (2, None)], []),
            ("lone CR", b'{"n":1}\r{"n":2}\n{"n":3}', [(3, None)], [JSON]),
            ("blank lines", b'\n  \n{"n":1}\n\t\n', [(1, None)], []),
            ("an array", b'[{"n":1}]\n{"n":2}\n', [(2, None)], [OBJECT]),
            ("null, a number, a string", b'null\n1\n"x"\n', [], [OBJECT, OBJECT, OBJECT]),
            ("an empty object", b"{}\n", [(None, None)], []),
            ("two objects in a line", b'{"n":1}{"n":2}\n', [], [JSON]),
            ("a comma behind", b'{"n":1},\n{"n":2}\n', [(2, None)], [JSON]),
            ("a comma within", b'{"n":1,}\n', [], [JSON]),
            ("cut off", b'{"n":1}\n{"n":', [(1, None)], [JSON]),
            ("cut off in a string", b'{"w":"a', [], [JSON]),
            ("an object over lines", b'{"n":\n1}\n{"n":2}\n', [(2, None)], [JSON, JSON]),
            ("text behind", b'{"n":1} x\n', [], [JSON]),
            ("a comment", b'{"n":1} // x\n', [], [JSON]),
            ("single quotes", b"{'n':1}\n", [], [JSON]),
            ("keys without quotes", b"{n:1}\n", [], [JSON]),
            ("NaN", b'{"n":NaN}\n', [], [JSON]),
            ("Infinity", b'{"n":Infinity}\n', [], [JSON]),
            ("a leading zero", b'{"n":01}\n', [], [JSON]),
            ("a plus sign", b'{"n":+1}\n', [], [JSON]),
            ("hexadecimal", b'{"n":0x1}\n', [], [JSON]),
            ("a bare minus", b'{"n":-}\n', [], [JSON]),
            ("a string for a number", b'{"n":"1"}\n', [], ["cannot parse"]),
            ("a boolean for a number", b'{"n":true}\n', [], ["cannot parse"]),
            ("a fraction for an integer", b'{"n":1.0}\n{"n":2}\n', [(2, None)], ["cannot parse"]),
            ("an exponent for an integer", b'{"n":1e2}\n', [], ["cannot parse"]),
            ("a list for a number", b'{"n":[1]}\n', [], ["cannot parse"]),
            ("a number beyond 64 bits", b'{"n":9223372036854775808}\n{"n":2}\n', [(2, None)], ["cannot parse"]),
            ("a number beyond 128 bits", b'{"n":' + b"9" * 50 + b"}\n", [], [JSON]),
            ("a number for a string", b'{"w":1}\n', [(None, "1")], []),
            ("an object for a string", b'{"w":{"a":1}}\n', [(None, '{"a": 1}')], []),
            ("a key twice", b'{"n":1,"n":2}\n', [(1, None)], []),
            ("an unknown key", b'{"n":1,"x":[{}]}\n', [(1, None)], []),
            ("latin-1", b'{"w":"\xe9"}\n{"n":2}\n', [(2, None)], [UTF8]),
            ("UTF-16", '{"n":1}\n'.encode("utf-16"), stop("UTF-16"), []),
            ("a raw NUL", b'{"w":"\x00"}\n', [], [JSON]),
            ("a NUL between", b'{"n":1}\x00\n{"n":2}\n', [(2, None)], [JSON]),
            ("an escaped NUL", b'{"w":"\\u0000"}\n', [(None, "\x00")], []),
            ("a raw tab", b'{"w":"a\tb"}\n', [], [JSON]),
            ("half of a pair", b'{"w":"\\ud800"}\n{"n":2}\n', [(2, None)], ["surrogate"]),
            ("the other half", b'{"w":"\\udc00x"}\n', [], ["surrogate"]),
            ("a whole pair", b'{"w":"\\ud83d\\ude00"}\n', [(None, "\U0001f600")], []),
            ("a backslash before u", b'{"w":"\\\\ud800"}\n', [(None, "\\ud800")], []),
            ("a bad escape", b'{"w":"\\x"}\n', [], [JSON]),
            ("a short escape", b'{"w":"\\u12"}\n', [], [JSON]),
            ("deep lists", b'{"w":' + DEEP + b'}\n{"n":2}\n', [(2, None)], ["too deep"]),
            ("deep lists in an unknown key", b'{"x":' + DEEP + b'}\n{"n":2}\n', [(2, None)], ["too deep"]),
            ("deep objects", b'{"w":' * 2000 + b"1" + b"}" * 2000 + b'\n{"n":2}\n', [(2, None)], ["too deep"]),
            ("a line beyond the limit", b'{"w":"' + b"x" * 16_000 + b'"}\n{"n":2}\n', [(2, None)], ["more than"]),
            ("CSV", b"n,w\n1,a\n", [], [JSON, JSON]),
        ],
    ),
    (
        {"schema": {"a": pl.Int8, "b": pl.Int16, "c": pl.UInt8, "d": pl.UInt16}},
        [
            ("small integers", b'{"a":-128,"b":-32768,"c":255,"d":65535}\n', [(-128, -32768, 255, 65535)], []),
            (
                "beyond small integers",
                b'{"a":128}\n{"b":40000}\n{"c":-1}\n{"d":65536}\n',
                [],
                ["Int8", "Int16", "UInt8", "UInt16"],
            ),
        ],
    ),
    ({"schema": F32}, [("a float beyond 32 bits", b'{"f":1e39}\n{"f":1.5}\n', [(1.5,)], ["Float32"])]),
    ({"schema": FLOAT}, [("a float beyond 64 bits", b'{"f":1e400}\n{"f":1}\n', [(1.0, None)], [JSON])]),
    (
        {"schema": BOOL},
        [
            (
                "1 and words for true",
                b'{"b":1}\n{"b":"true"}\n{"b":true}\n',
                [(True, None)],
                ["cannot parse", "cannot parse"],
            )
        ],
    ),
    (
        {"schema": LIST},
        [
            ("a value for a list", b'{"l":1}\n{"l":[1,null]}\n', [([1, None],)], ["unexpected value"]),
            ("words in a list", b'{"l":["a"]}\n{"l":[]}\n', [([],)], ["cannot parse"]),
            ("large numbers in a list", b'{"l":[9223372036854775808]}\n', [], ["unexpected value"]),
        ],
    ),
    (
        {"schema": TIME},
        [
            ("a number for a time", b'{"t":1704067200}\n', [], ["Datetime"]),
            ("words for a time", b'{"t":"soon"}\n{"w":"a"}\n', [(None, "a")], ["Datetime"]),
        ],
    ),
]

TEXT: list[tuple[dict[str, Any], list[Case]]] = [
    (
        {},
        [
            ("an empty file", b"", [], []),
            ("a line end alone", b"\n", [("",)], []),
            ("no last line end", b"a\nb", [("a",), ("b",)], []),
            ("CRLF", b"a\r\nb\r\n", [("a",), ("b",)], []),
            ("a lone CR", b"a\rb\n", [("a\rb",)], []),
            ("a BOM", BOM + b"a\n", [("a",)], []),
            ("a BOM in the midst", b"a\n" + BOM + b"b\n", [("a",), ("\ufeffb",)], []),
            ("latin-1", b"a\n\xe9\nb\n", [("a",), ("b",)], [UTF8]),
            ("half a character at the end", b"a\nb\xc3", [("a",)], [UTF8]),
            ("bytes of no text", bytes(range(128, 256)) + b"\na\n", [("a",)], [UTF8]),
            ("a NUL", b"a\x00b\n", [("a\x00b",)], []),
            ("UTF-16", "a\n".encode("utf-16"), stop("UTF-16"), []),
            ("a line beyond the limit", b"x" * 16_000 + b"\na\n", [("a",)], ["more than"]),
            ("other line separators", "a\u2028b\x0bc\x0cd\x85e\n".encode(), [("a\u2028b\x0bc\x0cd\x85e",)], []),
        ],
    )
]


def member(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


GZ: list[tuple[dict[str, Any], list[Case]]] = [
    (
        {"schema": NW},
        [
            ("an empty file", b"", [], []),
            ("nothing packed", member(b""), [], []),
            ("a header alone", member(b"n,w\n"), [], []),
            ("several members", member(b"n,w\n1,a\n") + member(b"2,b\n"), [(1, "a"), (2, "b")], []),
            ("a member that ends in a record", member(b"n,w\n1,") + member(b"a\n2,b\n"), [(1, "a"), (2, "b")], []),
            (
                "an empty member between",
                member(b"n,w\n1,a\n") + member(b"") + member(b"2,b\n"),
                [(1, "a"), (2, "b")],
                [],
            ),
            ("zeros behind", member(b"n,w\n1,a\n") + b"\x00" * 512, [(1, "a")], []),
            ("garbage behind", member(b"n,w\n1,a\n") + b"garbage", stop("cannot be read", "Not a gzipped file"), []),
            ("cut off in the data", member(b"n,w\n" + b"1,a\n" * 9)[:-14], stop("cannot be read"), []),
            ("cut off in the trailer", member(b"n,w\n1,a\n")[:-3], stop("cannot be read", "end-of-stream"), []),
            ("cut off in the head", member(b"n,w\n1,a\n")[:6], stop("cannot be read"), []),
            ("cut off in the second member", member(b"n,w\n1,a\n") + member(b"2,b\n")[:-3], stop("cannot be read"), []),
            (
                "a wrong checksum",
                member(b"n,w\n1,a\n")[:-8] + b"\x00" * 4 + member(b"n,w\n1,a\n")[-4:],
                stop("CRC"),
                [],
            ),
            ("a wrong length", member(b"n,w\n1,a\n")[:-4] + b"\x01\x00\x00\x00", stop("length"), []),
            ("not packed at all", b"n,w\n1,a\n", stop("Not a gzipped file"), []),
            ("packed otherwise", zlib.compress(b"n,w\n1,a\n"), stop("Not a gzipped file"), []),
            ("packed twice", member(member(b"n,w\n1,a\n")), stop("header"), []),
            (
                "a flipped bit",
                bytes([*member(b"n,w\n1,a\n")[:12], 0xFF, *member(b"n,w\n1,a\n")[13:]]),
                stop("cannot be read"),
                [],
            ),
            ("a quoted line break", member(b'n,w\n1,"a\n7,evil"\n2,b\n'), [(1, "a\n7,evil"), (2, "b")], []),
            ("latin-1", member(b"n,w\n1,\xe9\n2,b\n"), [(2, "b")], [UTF8]),
            ("a BOM", member(BOM + b"n,w\n1,a\n"), [(1, "a")], []),
            ("bad records", member(b"n,w\nx,a\n1\n2,b\n"), [(2, "b")], [INT, FIELDS]),
        ],
    )
]


def parquet(data: dict[str, Any], schema: Any = None, **options: Any) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table(data, schema=schema), out, **options)
    return out.getvalue()


GOOD = parquet({"n": [1, 2], "w": ["a", "b"]})


def arrow_file() -> bytes:
    out = io.BytesIO()
    table = pa.table({"n": [1]})
    with pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table)
    return out.getvalue()


PARQUET: list[tuple[dict[str, Any], list[Case]]] = [
    (
        {"schema": NW},
        [
            ("good", GOOD, [(1, "a"), (2, "b")], []),
            ("no rows", parquet({"n": pa.array([], pa.int64()), "w": pa.array([], pa.string())}), [], []),
            ("nulls", parquet({"n": [None, 1], "w": ["a", None]}), [(None, "a"), (1, None)], []),
            ("another order of columns", parquet({"x": [0], "w": ["a"], "n": [1]}), [(1, "a")], []),
            ("a column missing", parquet({"n": [1]}), stop("no column 'w'"), []),
            ("a column of another type", parquet({"n": ["1"], "w": ["a"]}), stop("column 'n' is a String"), []),
            (
                "a narrower type",
                parquet({"n": pa.array([1], pa.int32()), "w": ["a"]}),
                stop("column 'n' is a Int32"),
                [],
            ),
            ("no columns", parquet({}), stop("no column 'n'"), []),
            ("an empty file", b"", stop("cannot be read"), []),
            ("letters alone", b"PAR1", stop("cannot be read"), []),
            ("cut off", GOOD[:-20], stop("cannot be read"), []),
            ("cut off by one byte", GOOD[:-1], stop("cannot be read"), []),
            ("the footer alone", GOOD[-40:], stop("cannot be read"), []),
            ("a footer of absurd length", GOOD[:-8] + b"\xff\xff\xff\x7fPAR1", stop("cannot be read"), []),
            ("text", b"n,w\n1,a\n", stop("cannot be read"), []),
            ("Arrow", arrow_file(), stop("cannot be read"), []),
            ("a damaged page", GOOD[:4] + b"\xff" * 30 + GOOD[34:], stop("cannot be read"), []),
        ],
    )
]

ALL = [
    (format, extension, options, case)
    for format, extension, table in (
        ("csv", "csv", CSV),
        ("jsonl", "jsonl", JSONL),
        ("text", "txt", TEXT),
        ("csv", "csv.gz", GZ),
        ("parquet", "parquet", PARQUET),
    )
    for options, cases in table
    for case in cases
]


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.connectors.lines.RECORD_BYTES_MAX", 15_000)
    monkeypatch.setattr("penstock.connectors.lines.BLOCK_BYTES", 7)


def drain(path: Path, rows_max: int, parallelism: int, options: dict[str, Any]) -> tuple[list[Any], list[BadRecord]]:
    source = files(path, **options)
    source.open(SourceContext("in", None))
    rows: list[Any] = []
    bad: list[BadRecord] = []
    at = source.initial_offset()
    while (planned := source.plan(at, rows_max)) is not None:
        for split in source.splits(planned.start, planned.end, parallelism):
            result = source.read("in", split)
            rows += result.frame.rows()
            bad += (*result.bad, *result.set_aside)
        at = planned.end
    return rows, bad


@pytest.mark.parametrize(
    ("format", "extension", "options", "case"), ALL, ids=[f"{extension}: {case[0]}" for _, extension, _, case in ALL]
)
def test_a_file(format: str, extension: str, options: dict[str, Any], case: Case, tmp_path: Path) -> None:
    _, data, expected, reasons = case
    path = tmp_path / f"in.{extension}"
    path.write_bytes(data)
    options = {"format": format, **options}
    if isinstance(expected, str):
        with pytest.raises(PenstockError, match=f"(?s){expected}") as caught:
            drain(path, 100, 1, options)
        assert str(path) in str(caught.value) and caught.value.remedy
        rows, [letter] = drain(path, 100, 3, {**options, "on_unreadable": "dead_letter"})
        assert rows == [] and str(path) in letter.offset and letter.reason
        return
    for rows_max, parallelism in ((100, 1), (100, 5), (1, 2)):
        rows, bad = drain(path, rows_max, parallelism, options)
        assert rows == expected
        assert len(bad) == len(reasons), [b.reason for b in bad]
        for letter, reason in zip(bad, reasons, strict=True):
            assert reason in letter.reason
            assert letter.offset.startswith(f"{path}:")


# ---- names ----


@pytest.mark.parametrize("format", ["csv", "parquet", "jsonl", "text"])
def test_a_name_that_is_not_utf8(format: str, tmp_path: Path) -> None:
    name = os.fsencode(tmp_path) + b"/caf\xe9 \xff." + format.encode()
    row = {"csv": b"n,w\n1,a\nx,b\n", "parquet": GOOD, "jsonl": b'{"n":1,"w":"a"}\n[]\n', "text": b"a\n\xff\n"}[format]
    try:
        with open(name, "wb") as file:
            file.write(row)
    except OSError:
        pytest.skip("this file system takes no such names")
    schema = {} if format == "text" else {"schema": NW}
    source = files(tmp_path, format=format, path=True, **schema)
    source.open(SourceContext("in", None))
    planned = source.plan(source.initial_offset(), 100)
    assert planned is not None
    again = files(tmp_path, format=format, path=True, **schema)
    again.open(SourceContext("in", None))
    again.remember(json.loads(json.dumps(planned.facts).encode()))
    [split] = again.splits(planned.start, planned.end, 1)
    result = again.read("in", json.loads(json.dumps(split).encode("utf-8")))
    assert result.frame.height == (2 if format == "parquet" else 1)
    assert all("caf%E9%20%FF" in letter.offset for letter in result.bad)
    assert len(result.bad) == (format != "parquet")
    assert result.frame["path"].str.contains("caf%E9", literal=True).all()


def test_links_that_lead_in_circles_and_things_that_are_no_files(tmp_path: Path) -> None:
    folder = tmp_path / "in" / "deep"
    folder.mkdir(parents=True)
    (folder / "a.txt").write_text("a\n")
    (folder / "up").symlink_to(tmp_path / "in", target_is_directory=True)
    (folder / "self.txt").symlink_to(folder / "self.txt")
    (folder / "nowhere.txt").symlink_to(folder / "gone.txt")
    (folder / "b.txt").symlink_to(folder / "a.txt")
    os.mkfifo(folder / "pipe.txt")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(folder / "s.txt"))
        for pattern in (tmp_path / "in", tmp_path / "in" / "**" / "*.txt", tmp_path / "in" / "*" / "*.txt"):
            rows, bad = drain(pattern, 100, 2, {"format": "text", "path": True})
            assert [(line, os.path.basename(path)) for line, path in rows] == [("a", "a.txt"), ("a", "b.txt")], pattern
            assert not bad


# ---- records that are sent ----

PUSHED: list[tuple[str, bytes, dict[str, str], int, int, int]] = [
    # name, body, headers, status, rows, dead letters
    ("nothing", b"", {}, 200, 0, 0),
    ("blank lines", b"\n \n\n", {}, 200, 0, 0),
    ("one good, one bad", b'{"n":1}\n{"n":"x"}\n', {}, 200, 1, 1),
    ("no JSON", b"hello\n", {}, 200, 0, 1),
    ("latin-1", b'{"w":"\xe9"}\n{"n":1}', {}, 200, 1, 1),
    ("a NUL", b"\x00\n", {}, 200, 0, 1),
    ("a BOM", BOM + b'{"n":1}\n', {}, 200, 0, 1),
    ("cut off", b'{"n":1}\n{"n":', {}, 200, 1, 1),
    ("deep", b'{"w":' + DEEP + b"}\n", {}, 200, 0, 1),
    ("a half pair", b'{"w":"\\ud800"}', {}, 200, 0, 1),
    ("beyond 64 bits", b'{"n":9223372036854775808}', {}, 200, 0, 1),
    ("a document that is none", b"[", {"Content-Type": "application/json"}, 400, 0, 0),
    ("a document that is empty", b"", {"Content-Type": "application/json"}, 400, 0, 0),
    ("a document of two", b"{}{}", {"Content-Type": "application/json"}, 400, 0, 0),
    ("a document of numbers", b"[1, null, {}]", {"Content-Type": "application/json"}, 200, 1, 2),
    ("a document over lines", b'[\n{"n":\n1}\n]', {"Content-Type": "application/json"}, 200, 1, 0),
    ("a deep document", b"[" * 100_000, {"Content-Type": "application/json"}, 400, 0, 0),
    ("a document that is not UTF-8", b'[{"w":"\xe9"}]', {"Content-Type": "application/json"}, 400, 0, 0),
    ("a document with half a pair", b'[{"w":"\\ud800"}]', {"Content-Type": "application/json"}, 400, 0, 0),
    (
        "a document with a number of many digits",
        b"[" + b"1" * 9000 + b"]",
        {"Content-Type": "application/json"},
        400,
        0,
        0,
    ),
    ("a document with NaN", b'[{"n":NaN}]', {"Content-Type": "application/json"}, 200, 0, 1),
    ("packed", gzip.compress(b"{}"), {"Content-Encoding": "gzip"}, 415, 0, 0),
    ("too long", b"x" * 200_001, {}, 413, 0, 0),
    ("a key of no length", b"{}", {"Idempotency-Key": ""}, 400, 0, 0),
    ("a key that is too long", b"{}", {"Idempotency-Key": "k" * 201}, 400, 0, 0),
]


@pytest.fixture(scope="module")
def receiver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpSource]:
    source: HttpSource = ps.http_push(0, NW, body_bytes_max=200_000)
    source.open(SourceContext("in", str(tmp_path_factory.mktemp("state"))))
    yield source
    source.close()


@pytest.mark.parametrize("case", PUSHED, ids=[case[0] for case in PUSHED])
def test_a_body(receiver: HttpSource, case: tuple[str, bytes, dict[str, str], int, int, int]) -> None:
    _, body, headers, status, rows, bad = case
    url = urlsplit(receiver.address or "")
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=20)
    try:
        connection.request("POST", url.path, body, headers)
        answer = connection.getresponse()
        said = json.loads(answer.read())
    finally:
        connection.close()
    assert answer.status == status, said
    assert said == {"rows": rows, "bad": bad} if status == 200 else said["error"]


POST = b"POST / HTTP/1.1\r\n"
REQUESTS: list[tuple[str, bytes, int]] = [
    ("no HTTP", b"hello\r\n\r\n", 400),
    ("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    ("HTTP/2", b"PRI * HTTP/2.0\r\n\r\n", 400),
    ("HTTP/0.9", b"GET /\r\n\r\n", 400),
    ("another path", b"POST /x HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}", 404),
    ("another method", b"GET / HTTP/1.1\r\n\r\n", 405),
    ("no length", POST + b"\r\n", 411),
    ("a length that is no number", POST + b"Content-Length: two\r\n\r\n", 400),
    ("a negative length", POST + b"Content-Length: -1\r\n\r\n", 400),
    ("a length with a sign", POST + b"Content-Length: +2\r\n\r\n{}", 400),
    ("a length of other digits", POST + b"Content-Length: \xb2\r\n\r\n{}", 400),
    ("an absurd length", POST + b"Content-Length: 99999999999999\r\n\r\n", 413),
    ("a length of many digits", POST + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n", 413),
    ("two lengths", POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400),
    ("a length and chunks", POST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    ("another encoding", POST + b"Transfer-Encoding: gzip\r\n\r\n", 501),
    ("a chunk of no length", POST + b"Transfer-Encoding: chunked\r\n\r\nx\r\n", 400),
    ("a chunk of absurd length", POST + b"Transfer-Encoding: chunked\r\n\r\nffffffff\r\n", 413),
    ("a chunk of too many digits", POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"0" * 9 + b"\r\n", 400),
    ("a chunk longer than it says", POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{}\r\n0\r\n\r\n", 400),
    ("a chunk line without end", POST + b"Transfer-Encoding: chunked\r\n\r\n1;" + b"x" * 40_000, 400),
    ("trailers without end", POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"A: b\r\n" * 200, 431),
    ("a header without a colon", POST + b"Header\r\n\r\n", 400),
    ("a blank before a colon", POST + b"Content-Length : 2\r\n\r\n{}", 400),
    ("a folded header", POST + b"A: b\r\n c\r\nContent-Length: 2\r\n\r\n{}", 400),
    ("a NUL in a header", POST + b"A: \x00\r\n\r\n", 400),
    ("too many headers", POST + b"A: b\r\n" * 101 + b"\r\n", 431),
    ("a head that is too long", POST + b"A: " + b"x" * 40_000 + b"\r\n\r\n", 431),
    ("a head without end", b"x" * 40_000, 431),
    ("a path with blanks", b"POST /a b HTTP/1.1\r\n\r\n", 400),
    ("keys that contradict", POST + b"Idempotency-Key: a\r\nIdempotency-Key: b\r\nContent-Length: 2\r\n\r\n{}", 400),
]


@pytest.mark.parametrize("case", REQUESTS, ids=[case[0] for case in REQUESTS])
def test_a_request(receiver: HttpSource, case: tuple[str, bytes, int]) -> None:
    _, sent, status = case
    url = urlsplit(receiver.address or "")
    got = b""
    with socket.create_connection((url.hostname, url.port), timeout=20) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        while data := connection.recv(1 << 16):
            got += data
    assert got.startswith(b"HTTP/1.1 %d " % status), got
    assert json.loads(got.partition(b"\r\n\r\n")[2])["error"]


def test_there_are_two_hundred() -> None:
    assert len(ALL) + len(PUSHED) + len(REQUESTS) >= 200
    assert polars_schema(NW)
