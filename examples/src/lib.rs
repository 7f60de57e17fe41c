//! The parts that the example programs share, so that each of them is little more than its training loop: handwritten
//! digits (read or drawn), the networks, the command line, and the output.
//!
//! Nothing here depends on how many processes train together; the programs take care of that. A run over all of them is
//! recorded through an [`Accelerator`](accelerator::Accelerator).

mod args;
mod cnn;
mod course;
mod device;
pub mod digits;
mod error;
mod logging;
mod records;
mod reporter;
mod samples;
mod save;
mod score;
pub mod text;
mod tracking;
mod transformer;

pub use accelerator::ops::cross_entropy;

pub use crate::args::{ComparisonArgs, Dtype, MnistArgs, OptimizerName, ReportArgs};
pub use crate::cnn::{Cnn, CnnConfig};
pub use crate::course::Course;
pub use crate::device::DeviceName;
pub use crate::digits::{Digit, DigitBatch, DigitBatcher, Digits, Split};
pub use crate::error::{Error, Report, Result};
pub use crate::logging::init_logging;
pub use crate::reporter::Reporter;
pub use crate::samples::SampleLog;
pub use crate::save::save_model;
pub use crate::score::Score;
pub use crate::tracking::TrackArgs;
pub use crate::transformer::{Transformer, TransformerConfig};
