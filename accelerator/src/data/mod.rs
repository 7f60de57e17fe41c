//! Data loaders that divide samples among ranks.
//!
//! [`LoaderBuilder`] has the vocabulary of Burn's own. What it builds becomes this rank's
//! share by [`Accelerator::prepare`](crate::Accelerator::prepare).
//!
//! The assignment of samples to ranks is a pure function of the loader's settings, the world size, the epoch
//! and the position in it ([`plan`](crate::plan)). By default ([`TailPolicy::Exact`]) every
//! sample is used exactly once per epoch, every rank runs the same number of steps, and the
//! samples of a step do not depend on the world size: two ranks with batches of 32 do what one
//! does with batches of 64.
//!
//! | samples | build with | place and order |
//! |---|---|---|
//! | a data set | [`build`](LoaderBuilder::build) | in sequence, or shuffled by seed and epoch |
//! | … in an order of your own | [`sampler`](LoaderBuilder::sampler), [`weighted`](LoaderBuilder::weighted) | a list for each epoch, compared between ranks |
//! | … in batches of your own | [`batch_sampler`](LoaderBuilder::batch_sampler) | whole batches go round the ranks |
//! | … with a limit on tokens per batch | [`max_tokens`](LoaderBuilder::max_tokens), [`max_packed_tokens`](LoaderBuilder::max_packed_tokens) | whole batches of samples of similar length (`max_tokens`), or packed |
//! | a stream that is cheap to read | [`build_stream`](LoaderBuilder::build_stream) | every rank reads all of it |
//! | a stream in parts | [`build_sharded_stream`](LoaderBuilder::build_sharded_stream) | each rank reads its own part |
//! | a stream that one rank can read | [`build_dispatched_stream`](LoaderBuilder::build_dispatched_stream) | rank 0 reads and sends |
//! | one of Burn's own loaders | [`AssumeDeterministic`] | every rank reads all of it |
//!
//! All of them are saved and resumed in mid-epoch, skip batches
//! ([`skip_first_batches`](Epoch::skip_first_batches)), know their last batch ([`Batch::is_last`]), and
//! can be read inside each other's loops. Workers start and end with each epoch.
//!
//! # The same data set on every rank
//!
//! A rank gets a share of the indices, so an index must mean the same sample on every rank. Where there are several,
//! [`prepare`](crate::Accelerator::prepare) compares the number of samples and eight items that lie evenly over the
//! data set, which each rank reads twice: the words and numbers in their [`Debug`](core::fmt::Debug) texts, of each
//! item the first 64 KiB, in any order within it, without addresses. Neither other items, nor what
//! `map_samples` and the batcher make of them, nor streams are compared, and of Burn's own loaders the length alone. A
//! data set that cannot deliver these items is refused here, and not in its first epoch. Items without
//! `Debug` are not either: [`BuildUncompared`] builds their loaders. Where reading items takes long, or they are to
//! differ, leave it out with [`without_item_check`](LoaderBuilder::without_item_check): also where items hold what
//! each process has for itself, such as a path in a folder of its own, an `Instant` or a `ThreadId`. The error shows how
//! the first item begins that differs.
//!
//! Content that the texts lack is not compared: the values of tensors, which Burn does not print, the order of words,
//! and text that looks like an address (`0x…`). An item whose text is longer than 64 KiB and holds a map or a set in
//! that part is not compared, since the order of a `HashMap` is another one in each process. A stream has to give the
//! same samples in the same order on every rank: where it does not, some are used twice and others never, without a
//! warning. A job of one rank reads the items when it resumes, and warns where the two reads differ, since the resumed
//! training is then another one.
//!
//! | a data set that is drawn | is the same on every rank with |
//! |---|---|
//! | from `rand::rng()` or the time, while it is built | a generator that is seeded by a number of the program |
//! | by Burn's `ShuffledDataset` | `ShuffledDataset::new(dataset, seed)`, not the system's generator; or the builder's [`shuffle`](LoaderBuilder::shuffle), which is another order in each epoch |
//! | by Burn's `SamplerDataset` | nothing, also not `with_seed`: it draws anew for each index that is read, in the order of reading. Use [`weighted`](LoaderBuilder::weighted), [`weighted_without_replacement`](LoaderBuilder::weighted_without_replacement) or [`sampler`](LoaderBuilder::sampler) |
//! | for augmentation, in `get` | [`map_samples`](LoaderBuilder::map_samples), seeded by [`SamplePlace::rng_seed`] |
//!
//! # Random numbers
//!
//! Random draws depend on the position in the data, not on workers or on what was read before. So a resumed training
//! draws the same as one that was never interrupted.
//!
//! | what draws | from | depends on |
//! |---|---|---|
//! | the order of samples | nothing: it is a function | the loader's seed and the epoch |
//! | [`map_samples`](LoaderBuilder::map_samples) | a generator of the program's own, seeded by [`SamplePlace::rng_seed`] | a seed, the epoch and the sample; the same at any number of ranks |
//! | the batcher | the device: `Tensor::random` | the accelerator's seed, the rank, the loader, the epoch and the step |
//! | the model in a step: dropout | the device | the same |
//!
//! A device has one generator, from which the model draws while workers load. So a batcher that draws from the
//! device is called on the thread that asks for the batch, before the step begins; workers continue to load its
//! samples. Its first batch shows whether it draws. Where a batcher draws in some batches only, the first may not
//! show it: build its loader with [`num_workers(0)`](LoaderBuilder::num_workers). Data sets, streams and
//! `map_samples` always run on workers, and must not draw from the device.
//!
//! ```
//! use accelerator::prelude::*;
//! use burn::data::{dataloader::batcher::Batcher, dataset::InMemDataset};
//! use burn::tensor::{Device, Distribution, Tensor};
//!
//! /// Adds noise.
//! struct Noisy;
//!
//! impl Batcher<f32, Tensor<1>> for Noisy {
//!     fn batch(&self, items: Vec<f32>, device: &Device) -> Tensor<1> {
//!         let noise = Tensor::random([items.len()], Distribution::Normal(0.0, 0.1), device);
//!         Tensor::from_floats(items.as_slice(), device) + noise
//!     }
//! }
//!
//! let accelerator = Accelerator::new()?;
//! let loader = LoaderBuilder::new(Noisy)
//!     .batch_size(4)
//!     .num_workers(2)
//!     .build(InMemDataset::new(vec![1.0; 40]));
//! let loader = accelerator.prepare(loader)?;
//! let values = |skipped| -> Result<Vec<_>> {
//!     let batches = loader.epoch(0).skip_first_batches(skipped);
//!     batches.map(|batch| Ok(batch?.into_inner().into_data())).collect()
//! };
//! assert_eq!(values(0)?[7..], values(7)?);
//! # Ok::<(), Error>(())
//! ```
//!
//! If ranks are threads of one process ([`launch`](crate::launch())), they share the device's generator: what a
//! batcher draws, and dropout, are not reproducible there. The same holds for other threads of the program that
//! draw from the device during the training, and for a batcher of one of Burn's own loaders ([`AssumeDeterministic`]), which
//! runs on a worker always.
//!
//! [`TailPolicy::Exact`]: crate::plan::TailPolicy::Exact

pub(crate) mod batch;
mod builder;
mod cursor;
mod epoch;
mod exchange_step;
mod loader_state;
mod opaque;
mod order;
mod prepared;
mod source;
mod steppers;
mod stream;

pub use self::batch::Batch;
pub(crate) use self::batch::UncountedPadding;
pub use self::builder::{BuildUncompared, Loader, LoaderBuilder};
pub(crate) use self::cursor::{ConsumeTicket, EpochPosition};
pub use self::epoch::Epoch;
pub(crate) use self::loader_state::{LoaderResume, LoaderState};
pub use self::opaque::AssumeDeterministic;
pub use self::prepared::PreparedLoader;
pub(crate) use self::source::DRAWN_HINT;
pub use self::source::SamplePlace;
pub use self::stream::{SampleStream, StreamError, StreamItems, StreamPart};
