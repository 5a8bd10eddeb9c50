"""The operators of com.microsoft that are not declared, each with its reason: onnxruntime 1.32 has 150 in all.

The documentation prints this table, and a test holds it against the onnxruntime that is installed.
"""

_LOOPS = "a whole generation loop in one node; generation runs outside of the graph here"
_ENGINE = "part of onnxruntime's CUDA engines, which no model file is exported with"
_DRAFTS = "replays the tokens that a CUDA engine drafted; a step here is exact by itself"
_PACKED = "encoders with their padding taken out, on CUDA; no decoder has it"
_LAYOUT = "a layout of one kind of hardware, which no exporter writes"
_SESSION = "made by onnxruntime when it loads a model for a GPU; the file has the operators that it joins"
_FLOAT8 = "8-bit and 4-bit floats, of which MLX has no array"
_TRAINING = "training"
_IMAGES = "detects or segments images; no part of a decoder or its encoder"
_STREAMS = "residual streams of research models that no exporter writes yet"
_HASHES = "hashes of n-grams in 64-bit integers; nothing on a device is wider than 32 bits"
_OLD = "models older than transformers; no decoder has it"

# Operator -> why it is left out.
LEFT_OUT: dict[str, str] = {
    "AttnLSTM": _OLD,
    "BeamSearch": _LOOPS,
    "BifurcationDetector": _LOOPS,
    "BitmaskBiasDropout": _TRAINING,
    "BitmaskDropout": _TRAINING,
    "CDist": "distances between two sets of points; no decoder has it",
    "ComplexMul": "Fourier transforms on CUDA, in a layout that ONNX's DFT has replaced",
    "ComplexMulConj": "Fourier transforms on CUDA, in a layout that ONNX's DFT has replaced",
    "ConvStateReplay": _DRAFTS,
    "ConvTransposeWithDynamicPads": _IMAGES,
    "CropAndResize": _IMAGES,
    "DecoderAttention": "attention of fairseq's decoders, with a kernel on CUDA alone and no exporter since",
    "DecoderMaskedSelfAttention": "written by onnxruntime's generation loops for CUDA, whose order of keys it keeps",
    "DequantizeBFP": _LAYOUT,
    "DequantizeWithOrder": _LAYOUT,
    "DynamicSparseAttention": _ENGINE,
    "DynamicTimeWarping": "aligns words with sound after Whisper has decoded; no step needs it",
    "EPContext": "a model compiled for one accelerator, as bytes",
    "EngramGate": _HASHES,
    "GatedDeltaNetStateReplay": _DRAFTS,
    "GatherPacked": _ENGINE,
    "GemmFloat8": _FLOAT8,
    "GreedySearch": _LOOPS,
    "HyperConnectionLowRankMix": _STREAMS,
    "HyperConnectionPostMix": _STREAMS,
    "HyperConnectionPreMix": _STREAMS,
    "Irfft": "Fourier transforms on CUDA, in a layout that ONNX's DFT has replaced",
    "IsAllFinite": _TRAINING,
    "LongformerAttention": "an encoder's attention, with a kernel on CUDA alone",
    "Mamba2Verify": _DRAFTS,
    "MatMulBlockQuantizedFp4Weight": _FLOAT8,
    "MatMulBlockQuantizedFp8Weight": _FLOAT8,
    "MatMulFpQ4": "weights as one kind of CPU packs them; MatMulNBits is the form for files",
    "MatMulNBitsMlp": _SESSION,
    "MatMulNBitsQLoRA": _SESSION,
    "MatMulNBitsQkv": _SESSION,
    "MatMulPacked": _LAYOUT,
    "MaxpoolWithMask": _IMAGES,
    "MoEPacked": _LAYOUT,
    "MurmurHash3": _HASHES,
    "NGramHashMapping": _HASHES,
    "NGramRepeatBlock": "a processor of scores; generation applies no_repeat_ngram_size itself",
    "NhwcMaxPool": _IMAGES,
    "PackedAttention": _PACKED,
    "PackedMultiHeadAttention": _PACKED,
    "PackedSparseAttentionIndexer": _ENGINE,
    "PackedSparseAttentionIndexerMerge": _ENGINE,
    "QOrderedAttention": _LAYOUT,
    "QOrderedGelu": _LAYOUT,
    "QOrderedLayerNormalization": _LAYOUT,
    "QOrderedLongformerAttention": _LAYOUT,
    "QOrderedMatMul": _LAYOUT,
    "QuantizeBFP": _LAYOUT,
    "QuantizeWithOrder": _LAYOUT,
    "RMSNormRotary": _SESSION,
    "RemovePadding": _PACKED,
    "RestorePadding": _PACKED,
    "Rfft": "Fourier transforms on CUDA, in a layout that ONNX's DFT has replaced",
    "RouterGateUpProj": _SESSION,
    "SampleOp": "an example for those who write operators",
    "Sampling": _LOOPS,
    "Snpe": "a model compiled for one accelerator, as bytes",
    "SparseAttentionIndexer": _ENGINE,
    "SparsePagedAttention": _ENGINE,
    "SparseToDenseMatMul": "sparse tensors, of which MLX has none",
    "SpeculativePrefixCommit": _DRAFTS,
    "Tokenizer": "strings; text becomes tokens before the graph",
    "VarlenNGramHashMapping": _HASHES,
    "WhisperBeamSearch": _LOOPS,
    "WordConvEmbedding": _OLD,
}
