"""Dead letters: an input with malformed rows, and where they go.

    python examples/dead_letters.py
    penstock run examples/dead_letters.py --checkpoint state/dead-letters

A record that does not fit the schema, or for which a function on rows raises, does not stop the job and is not lost:
it goes to the dead-letter sink with its place, the reason and its text. With ``ps.Flow(..., on_error="fail")`` the
first such record would end the job instead, and be shown.
"""

from pathlib import Path
from typing import Any

import penstock as ps

ORDERS = Path(__file__).parent / "data" / "orders.csv"
OUT, REJECTED = "out/paid", "out/rejected"


def cents(order: dict[str, Any]) -> dict[str, Any] | None:
    """A function on a row: gives a row, or None to drop it. What it raises makes the row a dead letter."""
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
