"""The common tests of `transformers` that fail on our classes (`tests/transformers_common.py`): class → tests."""

CHECKPOINTING = [
    "test_gradient_checkpointing_enable_disable",
    "test_training_gradient_checkpointing",
    "test_training_gradient_checkpointing_use_reentrant_false",
    "test_training_gradient_checkpointing_use_reentrant_true",
]
KNOWN = {
    "OursTest": CHECKPOINTING,
    "LlamaTest": ["test_can_capture_specific_layers_hidden_states", "test_tied_weights_keys"],
}
