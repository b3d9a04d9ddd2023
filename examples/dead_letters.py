"""Dead letters: malformed rows of an input go to a sink of their own.

    python examples/dead_letters.py
    penstock run examples/dead_letters.py --checkpoint state/dead-letters

A record may not fit the schema, or a function on rows may raise for it. Such a record does not stop the job and is not
lost: it goes to the dead-letter sink with its place, the reason and its text. With ``ps.Flow(..., on_error="fail")``
the first such record ends the job, and the error shows it.
"""

from pathlib import Path
from typing import Any

import penstock as ps

ORDERS = Path(__file__).parent / "data" / "orders.csv"
OUT, REJECTED = "out/paid", "out/rejected"


def cents(order: dict[str, Any]) -> dict[str, Any] | None:
    """Turn a row into another, or into None to drop it. A row for which this raises becomes a dead letter."""
    if not order["amount"]:
        raise ValueError("an order of nothing")
    return {"customer": order["customer"], "cents": round(order["amount"] * 100)} if order["paid"] else None


flow = ps.Flow("dead-letters", on_error="dead_letter")
orders = flow.source("orders", ps.files(ORDERS, schema={"customer": str, "amount": float, "paid": bool}))
paid = orders.map_rows("cents", cents, schema={"customer": str, "cents": int})
paid.key_by("customer").aggregate("paid", cents=ps.sum("cents"), orders=ps.count()).sink("out", ps.csv(OUT))
flow.dead_letters(ps.jsonl(REJECTED))


def show() -> None:
    for row in (
        ps.read_output(OUT).group_by("customer", maintain_order=True).last().sort("customer").iter_rows(named=True)
    ):
        print(f"{row['customer']:5} {row['cents'] / 100:6.2f} in {row['orders']} orders")
    print("set aside:")
    for row in ps.read_output(REJECTED).sort("source", "offset", descending=[True, False]).iter_rows(named=True):
        print(f"  {row['source']}: {row['reason']}: {row['raw']}")


if __name__ == "__main__":
    ps.run(flow, checkpoint="state/dead-letters").wait()
    show()
