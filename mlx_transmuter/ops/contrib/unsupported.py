"""The operators of com.microsoft that are not declared, each with its reason: onnxruntime 1.32 has 150 in all.

The documentation prints this table, and a test holds it against the onnxruntime that is installed.
"""

_GENERATION_LOOP = "a whole generation loop in one node; generation runs outside of the graph here"
_CUDA_ENGINE = "part of onnxruntime's CUDA engines, which no model file is exported with"
_DRAFT_REPLAY = "replays the tokens that a CUDA engine drafted; a step here is exact by itself"
_UNPADDED_ENCODER = "encoders with their padding taken out, on CUDA; no decoder has it"
_HARDWARE_LAYOUT = "a layout of one kind of hardware, which no exporter writes"
_SESSION_FUSION = "made by onnxruntime when it loads a model for a GPU; the file has the operators that it joins"
_SMALL_FLOATS = "8-bit and 4-bit floats, of which MLX has no array"
_TRAINING = "training"
_VISION = "detects or segments images; no part of a decoder or its encoder"
_RESIDUAL_STREAMS = "residual streams of research models that no exporter writes yet"
_NGRAM_HASHES = "hashes of n-grams in 64-bit integers; nothing on a device is wider than 32 bits"
_PRE_TRANSFORMER = "models older than transformers; no decoder has it"

# Operator -> why it is left out.
UNSUPPORTED_OPERATORS: dict[str, str] = {
    "AttnLSTM": _PRE_TRANSFORMER,
    "BeamSearch": _GENERATION_LOOP,
    "BifurcationDetector": _GENERATION_LOOP,
    "BitmaskBiasDropout": _TRAINING,
    "BitmaskDropout": _TRAINING,
    "CDist": "distances between two sets of points; no decoder has it",
    "ComplexMul": "Fourier transforms on CUDA, in a layout that ONNX's DFT has replaced",
    "ComplexMulConj": "Fourier transforms on CUDA, in a layout that ONNX's DFT has replaced",
    "ConvStateReplay": _DRAFT_REPLAY,
    "ConvTransposeWithDynamicPads": _VISION,
    "CropAndResize": _VISION,
    "DecoderAttention": "attention of fairseq's decoders, with a kernel on CUDA alone and no exporter since",
    "DecoderMaskedSelfAttention": "written by onnxruntime's generation loops for CUDA, whose order of keys it keeps",
    "DequantizeBFP": _HARDWARE_LAYOUT,
    "DequantizeWithOrder": _HARDWARE_LAYOUT,
    "DynamicSparseAttention": _CUDA_ENGINE,
    "DynamicTimeWarping": "aligns words with sound after Whisper has decoded; no step needs it",
    "EPContext": "a model compiled for one accelerator, as bytes",
    "EngramGate": _NGRAM_HASHES,
    "GatedDeltaNetStateReplay": _DRAFT_REPLAY,
    "GatherPacked": _CUDA_ENGINE,
    "GemmFloat8": _SMALL_FLOATS,
    "GreedySearch": _GENERATION_LOOP,
    "HyperConnectionLowRankMix": _RESIDUAL_STREAMS,
    "HyperConnectionPostMix": _RESIDUAL_STREAMS,
    "HyperConnectionPreMix": _RESIDUAL_STREAMS,
    "Irfft": "Fourier transforms on CUDA, in a layout that ONNX's DFT has replaced",
    "IsAllFinite": _TRAINING,
    "LongformerAttention": "an encoder's attention, with a kernel on CUDA alone",
    "Mamba2Verify": _DRAFT_REPLAY,
    "MatMulBlockQuantizedFp4Weight": _SMALL_FLOATS,
    "MatMulBlockQuantizedFp8Weight": _SMALL_FLOATS,
    "MatMulFpQ4": "weights as one kind of CPU packs them; files have MatMulNBits",
    "MatMulNBitsMlp": _SESSION_FUSION,
    "MatMulNBitsQLoRA": _SESSION_FUSION,
    "MatMulNBitsQkv": _SESSION_FUSION,
    "MatMulPacked": _HARDWARE_LAYOUT,
    "MaxpoolWithMask": _VISION,
    "MoEPacked": _HARDWARE_LAYOUT,
    "MurmurHash3": _NGRAM_HASHES,
    "NGramHashMapping": _NGRAM_HASHES,
    "NGramRepeatBlock": "a processor of scores; generation applies no_repeat_ngram_size itself",
    "NhwcMaxPool": _VISION,
    "PackedAttention": _UNPADDED_ENCODER,
    "PackedMultiHeadAttention": _UNPADDED_ENCODER,
    "PackedSparseAttentionIndexer": _CUDA_ENGINE,
    "PackedSparseAttentionIndexerMerge": _CUDA_ENGINE,
    "QOrderedAttention": _HARDWARE_LAYOUT,
    "QOrderedGelu": _HARDWARE_LAYOUT,
    "QOrderedLayerNormalization": _HARDWARE_LAYOUT,
    "QOrderedLongformerAttention": _HARDWARE_LAYOUT,
    "QOrderedMatMul": _HARDWARE_LAYOUT,
    "QuantizeBFP": _HARDWARE_LAYOUT,
    "QuantizeWithOrder": _HARDWARE_LAYOUT,
    "RMSNormRotary": _SESSION_FUSION,
    "RemovePadding": _UNPADDED_ENCODER,
    "RestorePadding": _UNPADDED_ENCODER,
    "Rfft": "Fourier transforms on CUDA, in a layout that ONNX's DFT has replaced",
    "RouterGateUpProj": _SESSION_FUSION,
    "SampleOp": "an example for those who write operators",
    "Sampling": _GENERATION_LOOP,
    "Snpe": "a model compiled for one accelerator, as bytes",
    "SparseAttentionIndexer": _CUDA_ENGINE,
    "SparsePagedAttention": _CUDA_ENGINE,
    "SparseToDenseMatMul": "sparse tensors, of which MLX has none",
    "SpeculativePrefixCommit": _DRAFT_REPLAY,
    "Tokenizer": "strings; text becomes tokens before the graph",
    "VarlenNGramHashMapping": _NGRAM_HASHES,
    "WhisperBeamSearch": _GENERATION_LOOP,
    "WordConvEmbedding": _PRE_TRANSFORMER,
}
