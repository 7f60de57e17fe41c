use burn::nn::loss::CrossEntropyLossConfig;
use burn::tensor::{Int, Tensor};

/// Returns the mean cross-entropy of logits `[batch, classes]` against labels `[batch]`, a scalar.
pub fn cross_entropy(logits: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
    CrossEntropyLossConfig::new()
        .init(&logits.device())
        .forward(logits, targets)
}
