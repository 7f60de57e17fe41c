//! Data loaders that share samples out among ranks.
//!
//! [`DataLoaderBuilder`] has the vocabulary of Burn's own. What it builds becomes this rank's
//! share by [`Accelerator::prepare`](crate::Accelerator::prepare).
//!
//! Who gets which sample is a pure function of the loader's settings, the world size, the epoch
//! and the position in it ([`plan`](crate::plan)). By default ([`TailPolicy::Exact`]) every
//! sample is used exactly once an epoch, every rank runs the same number of steps, and the
//! samples of a step do not depend on the world size: two ranks with batches of 32 do what one
//! does with batches of 64.
//!
//! [`TailPolicy::Exact`]: crate::plan::TailPolicy::Exact

mod batch;
mod builder;
mod burn_loader;
mod cursor;
mod epoch;
mod feed;
mod opaque;
mod prepared;
mod source;
mod standing;

pub use self::batch::Batch;
pub use self::builder::{DataLoaderBuilder, Loader};
pub(crate) use self::cursor::{Mark, Spot};
pub use self::epoch::Epoch;
pub use self::opaque::InOrder;
pub use self::prepared::PreparedLoader;
pub(crate) use self::standing::{Continuation, Standing};
pub use accelerator_plan::{TailPolicy, sample_rng_seed};
