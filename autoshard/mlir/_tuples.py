"""Tuples, of which computations of HLO that are called as one op are made, taken apart."""

from typing import Any

from autoshard.mlir._module import collect


def tuple_calls(module: Any) -> list[str]:
    """Targets of the custom calls that give tuples: factorisations of LAPACK, say."""
    calls = collect(module.operation, {"stablehlo.custom_call"})
    tupled = [op for op in calls if any("tuple<" in str(result.type) for result in op.results)]
    return sorted({str(op.attributes["call_target_name"]).strip('"') for op in tupled})


def fold_tuples(root: Any) -> None:
    """Replace every element that is taken out of a tuple by what was put into it, and drop the tuples (in place)."""
    from jaxlib.mlir import ir

    for op in collect(root, {"stablehlo.get_tuple_element"}):
        whole = op.operands[0].owner
        if isinstance(whole, ir.Block) or whole.name != "stablehlo.tuple":
            continue
        number = ir.IntegerAttr(op.attributes["index"]).value
        op.results[0].replace_all_uses_with(whole.operands[number])
        op.erase()
    for op in reversed(collect(root, {"stablehlo.tuple"})):
        if not any(True for _ in op.results[0].uses):
            op.erase()
