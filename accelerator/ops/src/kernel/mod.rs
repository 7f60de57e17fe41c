//! Kernels on slices of numbers.

mod attention;
mod batch_norm;
mod conv;
mod cross_entropy;
mod dropout;
mod elementwise;
mod embedding;
mod linear;
mod loops;
mod lstm;
mod math;
mod norm;
mod patches;
mod pool;
mod product;

pub(crate) use self::attention::{Attention, MOST_KEPT, Mask};
pub(crate) use self::batch_norm::{Statistics, batch_norm};
pub(crate) use self::conv::{Then, convolution};
pub(crate) use self::cross_entropy::cross_entropy;
pub(crate) use self::dropout::Dropout;
pub(crate) use self::elementwise::Elementwise;
pub(crate) use self::embedding::embedding;
pub(crate) use self::linear::linear;
pub(crate) use self::lstm::lstm;
pub(crate) use self::norm::Norm;
pub(crate) use self::patches::ConvShape;
pub(crate) use self::pool::{Divisor, PoolShape, avg_pool, max_pool};
