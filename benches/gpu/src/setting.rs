//! Words of the command line that several commands share.

use std::error::Error;

use accelerator::prelude::*;
use accelerator_examples::DeviceName;
use burn::tensor::FloatDType;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::outcome::Unsupported;

/// What forward and backward compute in; parameters stay in f32.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Computing {
    /// Single precision
    F32,
    /// bfloat16
    Bf16,
    /// Half precision, with a scaled loss
    F16,
}

impl Computing {
    /// The type of a working copy; `None` where the parameters themselves are used.
    pub(crate) fn dtype(self) -> Option<FloatDType> {
        match self {
            Self::F32 => None,
            Self::Bf16 => Some(FloatDType::BF16),
            Self::F16 => Some(FloatDType::F16),
        }
    }
}

impl From<Computing> for Precision {
    fn from(computing: Computing) -> Self {
        match computing {
            Computing::F32 => Self::No,
            Computing::Bf16 => Self::Bf16,
            Computing::F16 => Self::F16,
        }
    }
}

/// How large models and batches are.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Size {
    /// What gives a GPU something to do
    Full,
    /// What a CPU does in a moment, to rehearse
    Tiny,
}

/// An accelerator that computes so.
///
/// # Errors
///
/// [`Unsupported`] where the device is there and does not compute so.
pub(crate) fn open(
    device: DeviceName,
    computing: Computing,
    seed: u64,
) -> Result<Accelerator, Box<dyn Error>> {
    let builder = || Accelerator::builder().device(BackendKind::from(device));
    if let Some(dtype) = computing.dtype() {
        let whole = builder().build()?;
        if !whole.device().supports_dtype(dtype) {
            let text = format!("the device `{device}` does not compute in {dtype:?}");
            return Err(Unsupported(text).into());
        }
        whole.finish()?;
    }
    let precision = computing.into();
    Ok(builder().precision(precision).seed(seed).build()?)
}
