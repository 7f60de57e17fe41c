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
//! | samples | build with | place and order |
//! |---|---|---|
//! | a data set | [`build`](DataLoaderBuilder::build) | in sequence, or shuffled by seed and epoch |
//! | … in an order of your own | [`sampler`](DataLoaderBuilder::sampler), [`weighted`](DataLoaderBuilder::weighted) | a list for each epoch, compared between ranks |
//! | … in batches of your own | [`batch_sampler`](DataLoaderBuilder::batch_sampler) | whole batches go round the ranks |
//! | a stream that is cheap to read | [`build_stream`](DataLoaderBuilder::build_stream) | every rank reads all of it |
//! | a stream in parts | [`build_sharded_stream`](DataLoaderBuilder::build_sharded_stream) | each rank reads its own part |
//! | a stream that one rank can read | [`build_dispatched_stream`](DataLoaderBuilder::build_dispatched_stream) | rank 0 reads and sends |
//! | one of Burn's own loaders | [`InOrder`] | every rank reads all of it |
//!
//! All of them are saved and resumed in mid-epoch, skip batches
//! ([`skip_first_batches`](Epoch::skip_first_batches)), know their last batch ([`Batch::is_last`]), and
//! can be read inside each other's loops. Workers are started with each epoch, and end with it: a
//! thread is started and joined in less than 0.2 ms.
//!
//! [`TailPolicy::Exact`]: crate::plan::TailPolicy::Exact

mod batch;
mod builder;
mod burn_loader;
mod cursor;
mod epoch;
mod feed;
mod loader;
mod meeting;
mod opaque;
mod order;
mod prepared;
mod source;
mod spec;
mod standing;
mod stream;

pub use self::batch::Batch;
pub use self::builder::DataLoaderBuilder;
pub(crate) use self::cursor::{Mark, Spot};
pub use self::epoch::Epoch;
pub use self::loader::Loader;
pub use self::opaque::InOrder;
pub use self::prepared::PreparedLoader;
pub use self::source::SamplePlace;
pub(crate) use self::standing::{Continuation, Standing};
pub use self::stream::{SampleStream, StreamError, StreamItems, StreamPart};
pub use accelerator_plan::{TailPolicy, sample_rng_seed};
