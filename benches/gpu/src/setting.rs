//! Values of the command line that several commands share.

use std::error::Error;

use accelerator::prelude::*;
use accelerator_examples::DeviceName;
use burn::tensor::FloatDType;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::outcome::Unsupported;

/// The precision of forward and backward; parameters stay in f32.
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
    /// Returns the type of the working copy; `None` if the parameters themselves are used.
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

/// The size of models and batches.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Size {
    /// Enough work for a GPU
    Full,
    /// Quick on a CPU, to rehearse
    Tiny,
}

/// Creates an accelerator that computes in that precision.
///
/// # Errors
///
/// [`Unsupported`] if the device exists but does not support the precision.
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
