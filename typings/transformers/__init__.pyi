# Its module of all models takes a type checker half a minute to read, and says nothing that we use.
from typing import Any

def __getattr__(name: str) -> Any: ...
