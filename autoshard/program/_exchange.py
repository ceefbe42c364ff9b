"""How queries meet keys and values where a plan splits the sequence of attention: names that a program may ask for."""

from autoshard.errors import UserError


EXCHANGES = ("auto", "gather", "heads", "ring")
"""As is fastest; every device keeps its queries and gathers keys and values; from a split of the sequence to one of the
heads and back; keys and values go around a ring."""


def check_exchange_name(exchange: str) -> str:
    """The name. Raises `UserError` for one that there is not."""
    if exchange not in EXCHANGES:
        raise UserError(f"exchange `{exchange}` is not known; use {', '.join(EXCHANGES[:-1])} or {EXCHANGES[-1]}.")
    return exchange
