//! Outputs of validation, joined over ranks.

use burn::tensor::{Int, Tensor};
use burn_train::{
    ClassificationOutput, MultiLabelClassificationOutput, RegressionOutput, SequenceOutput,
};

use crate::accelerator::Tensors;

/// The output of a model in validation, joined with the rows of the other ranks for metrics that see all
/// samples. The outputs of burn-train implement it; a custom one names its tensors:
///
/// ```
/// use accelerator::learner::ValidationOutput;
/// use burn::tensor::{Int, Tensor};
///
/// struct Boxes {
///     loss: Tensor<1>,
///     corners: Tensor<3>,
///     classes: Tensor<2, Int>,
/// }
///
/// impl ValidationOutput for Boxes {
///     type Tensors = (Tensor<1>, Tensor<3>, Tensor<2, Int>);
///
///     fn into_tensors(self) -> Self::Tensors {
///         (self.loss, self.corners, self.classes)
///     }
///
///     fn from_tensors((loss, corners, classes): Self::Tensors) -> Self {
///         Self { loss, corners, classes }
///     }
/// }
/// ```
///
/// Tensors are joined along the first dimension, in which one has a row for each sample, or is about the batch, as a
/// loss of one element. The other dimensions are the same on all ranks: sequences are padded to one length.
pub trait ValidationOutput: Sized {
    /// The type of all its tensors together.
    type Tensors: Tensors;

    /// Takes it apart.
    fn into_tensors(self) -> Self::Tensors;

    /// Puts it together, of the rows of all ranks.
    fn from_tensors(tensors: Self::Tensors) -> Self;
}

macro_rules! outputs {
    ($($output:ident { $($tensor:ident: $kind:ty),+ })+) => {
        $(impl ValidationOutput for $output {
            type Tensors = ($($kind,)+);

            fn into_tensors(self) -> Self::Tensors {
                ($(self.$tensor,)+)
            }

            fn from_tensors(($($tensor,)+): Self::Tensors) -> Self {
                Self { $($tensor),+ }
            }
        })+
    };
}

outputs! {
    ClassificationOutput { loss: Tensor<1>, output: Tensor<2>, targets: Tensor<1, Int> }
    MultiLabelClassificationOutput { loss: Tensor<1>, output: Tensor<2>, targets: Tensor<2, Int> }
    RegressionOutput { loss: Tensor<1>, output: Tensor<2>, targets: Tensor<2> }
    SequenceOutput {
        loss: Tensor<1>,
        logits: Tensor<3>,
        predictions: Option<Tensor<2, Int>>,
        targets: Tensor<2, Int>
    }
}
