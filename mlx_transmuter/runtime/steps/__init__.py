"""The steps of a decoder: pure functions of arrays, each compiled once for each shape.

The file of a step has its inputs (a NamedTuple of arrays) and a frozen dataclass of what its shapes follow from, which
builds the function and is the key under which the decoder keeps it compiled. Over pools a program reads and writes by
an index (pooled, draft, packed_prefill). Other graphs get their past as they want it, exact or as a buffer, and return
the keys and values of the step's tokens (past_present), which are written into the pools before the next step
(pool_write). A graph without a cache reads all tokens again (full_context).
"""
