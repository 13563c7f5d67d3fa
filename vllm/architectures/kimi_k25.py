"""Kimi K2.5 and K2.6: the decoder of Kimi K2 inside a multimodal model."""

from vllm.architectures.architecture import Composite

ARCHITECTURES = (
    Composite(
        "kimi_k25",
        # As its own code and as transformers call it.
        ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"),
        ("deepseek_v3", "kimi_k2"),
        ties_embeddings=True,
        skipped_tensors=("vision_tower.", "mm_projector."),
        renamed_tensors=(
            ("model.language_model.", "model."),
            ("language_model.model.", "model."),
            ("language_model.lm_head.", "lm_head."),
        ),
        has_mtp_layers=True,
        is_in_transformers=False,
        family="Kimi K2.5 and K2.6",
        notice="Kimi K2.5: serving the text model; images and videos are not supported",
    ),
)
