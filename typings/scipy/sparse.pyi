# What is read off its sources takes a type checker long, and is no type in the end.
from typing import Any

def __getattr__(name: str) -> Any: ...
