"""Group query: onnxruntime's GroupQueryAttention, which brings its own cache, rotation and mask, over the pools."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from converters.match import Answer, Become, Declined, Graph, is_kind
from converters.observe import Observation
from converters.passes.attention import checked
from mlx_transmuter.program import Node, Value
from mlx_transmuter.signature import INDEX, LANES, Entry

_KIND = "com.microsoft.GroupQueryAttention"
# Attributes that the rewrite has a form of; another one must have no effect.
_KNOWN = {"num_heads", "kv_num_heads", "scale", "softcap", "local_window_size", "do_rotary", "rotary_interleaved"}
_NEUTRAL = {
    "smooth_softmax": (-1, 0),
    "qk_output": (0,),
    "causal": (1,),
    "k_quant_type": ("NONE",),
    "v_quant_type": ("NONE",),
    "kv_cache_bit_width": (0,),
    "sliding_window_cache": (0,),
}
_POSITIONS = "index.positions"


def group_query(graph: Graph) -> Iterator[Answer]:
    """GroupQueryAttention(q, k, v, past) → rotary and mlx.attention over pools, at the positions of the index."""
    seen = Observation.of(graph.program)
    if seen is None or seen.signature.index:
        return
    nodes = [node for node in graph.nodes if is_kind(node, _KIND)]
    entries = {entry.past: entry for entry in seen.signature.entries}
    answers = []
    given: set[str] = set()
    for node in nodes:
        problem = _problem(graph, node, entries)
        if problem:
            yield Declined(node, problem)
            return
        answers.append(_rewritten(node, entries[node.inputs[3]], given))
    if not nodes:
        return
    if sorted(name for node in nodes for name in node.inputs[3:5]) != sorted(entries):
        yield Declined(nodes[0], "a part of the cache is used by something else than attention")
        return
    yield from checked(graph, seen.signature, answers, nodes[0])


def _problem(graph: Graph, node: Node, entries: dict[str, Entry]) -> str | None:
    """Why the node can't run over pools, or None."""
    inputs = dict(enumerate(node.inputs))
    if any(inputs.get(i) for i in range(9, len(node.inputs))):
        return "it has inputs beyond the rotary tables"
    for name, value in node.attrs.items():
        if name not in _KNOWN and not name.endswith("_epsilon") and value not in _NEUTRAL.get(name, ()):
            return f"its {name} is {value!r}"
    if inputs.get(3) not in entries or inputs.get(4) not in entries or any(node.outputs[3:]):
        return "its past is no input of the graph, or its scores are wanted"
    if bool(inputs.get(1)) != bool(inputs.get(2)):
        return "it has keys or values alone"
    return None


def _rewritten(node: Node, entry: Entry, given: set[str]) -> Become:
    attrs = node.attrs
    heads, kv, dim, out = int(attrs["num_heads"]), int(attrs["kv_num_heads"]), entry.dim, node.outputs[0]
    names = {part: f"{out}.{part}" for part in ("q", "k", "v")}
    constants: dict[str, np.ndarray] = {}
    nodes: list[Node] = []
    sources = dict(zip("qkv", node.inputs[:3], strict=False))
    if not sources.get("k"):
        sizes = f"{out}.sizes"
        constants[sizes] = np.array([heads * dim, kv * dim, kv * dim], np.int64)
        sources = {part: f"{name}.flat" for part, name in names.items()}
        nodes.append(Node("Split-18", (node.inputs[0], sizes), tuple(sources.values()), {"axis": -1}))
    rotated = bool(attrs.get("do_rotary", 0))
    if rotated and _POSITIONS not in given:
        given.add(_POSITIONS)
        nodes.append(Node("mlx.positions", (INDEX,), (_POSITIONS,)))
    for part, name in names.items():
        shape = f"{name}.shape"
        constants[shape] = np.array([0, 0, heads if part == "q" else kv, dim], np.int64)
        turned = f"{name}.flat4" if rotated and part != "v" else name
        nodes.append(Node("Reshape-5", (sources[part], shape), (f"{name}.4",)))
        nodes.append(Node("Transpose-1", (f"{name}.4",), (turned,), {"perm": [0, 2, 1, 3]}))
        if turned != name:
            tables = (_POSITIONS, *node.inputs[7:9])
            interleaved = {"interleaved": int(attrs.get("rotary_interleaved", 0))}
            nodes.append(Node("com.microsoft.RotaryEmbedding-1", (turned, *tables), (name,), interleaved))
    window = max(0, int(attrs.get("local_window_size", -1)))
    shown = f"seen.{window}" if window else "seen"
    if shown not in given:
        given.add(shown)
        nodes.append(Node("mlx.visible", (INDEX,), (shown,), {"window": window} if window else {}))
    scale = {"scale": float(attrs.get("scale", 0.0)) or 1 / math.sqrt(dim)}
    cap = {"softcap": float(attrs["softcap"])} if attrs.get("softcap") else {}
    flat = f"{out}.shape"
    constants[flat] = np.array([0, 0, heads * dim], np.int64)
    nodes += [
        Node(
            "mlx.attention",
            (names["q"], names["k"], names["v"], *node.inputs[3:5], LANES, shown),
            (f"{out}.heads", *node.outputs[1:3]),
            scale | cap,
            node.name,
        ),
        Node("Transpose-1", (f"{out}.heads",), (f"{out}.turned",), {"perm": [0, 2, 1, 3]}),
        Node("Reshape-5", (f"{out}.turned", flat), (out,)),
    ]
    inputs = (Value(INDEX, "cache_index", None), Value(LANES, "cache_index", None))
    return Become(node, tuple(nodes), constants=constants, inputs=inputs)
