//! Metrics that are summed on each rank and reduced over all ranks once.
//!
//! | to | see |
//! |---|---|
//! | average a loss or another figure | [`Mean`] |
//! | add something up, or count it | [`Sum`] |
//! | tell how often the answer is right | [`Accuracy`] |
//! | or among the best few | [`TopK`] |
//! | tell which classes are taken for which; precision, recall, F1 | [`Confusion`] |
//! | have something else | [`Metric`] |
//!
//! ```
//! use accelerator::metric::{Confusion, Mean};
//! use accelerator::prelude::*;
//!
//! let figures = launch(2, |accelerator| {
//!     let (mut loss, mut confusion) = (Mean::new(), Confusion::new(2));
//!     // In the loop, with what this rank's batch came to:
//!     loss.update(0.5, 3);
//!     confusion.count(&[0, 1, 1], &[0, 1, 0])?;
//!     // After it, both in one reduction:
//!     let (loss, confusion) = accelerator.reduce_metric((loss, confusion))?;
//!     Ok((loss.samples(), confusion.accuracy()))
//! })?;
//! assert_eq!(figures, [(6.0, 2.0 / 3.0); 2]);
//! # Ok::<(), accelerator::Error>(())
//! ```
//!
//! # In a checkpoint
//!
//! A figure that is built over an epoch is a part of the training, where that is saved in mid-epoch. What
//! is the same on every rank, as a mean of [`AveragedGradients::loss`](crate::AveragedGradients::loss), goes into the checkpoint
//! as an [`Object`](crate::checkpoint::Object). What each rank has counted by itself goes there as a
//! [`PerRank`](crate::checkpoint::PerRank) value, as long as there are as many ranks: rank `r` continues with
//! what rank `r` had. That of a rank which is no longer there would be lost; so where training may continue at
//! another number of ranks, save the figure of all of them, and let rank 0 alone continue with it: the sums
//! of all ranks are the same.
//!
//! ```
//! use accelerator::checkpoint::Object;
//! use accelerator::metric::Mean;
//! use accelerator::prelude::*;
//!
//! # let folder = tempfile::tempdir().unwrap();
//! # let folder = folder.path();
//! launch(3, |accelerator| {
//!     let mine = Mean::of(accelerator.rank() as f64, 2);
//!     let all = accelerator.reduce_metric(mine)?;
//!     accelerator.save_state(folder, Object(&all))?;
//!     Ok(())
//! })?;
//! let means = launch(2, |accelerator| {
//!     let (Object(all), _) = accelerator.resume(folder, Object(Mean::new()))?;
//!     let mut mine = if accelerator.is_main_process() { all } else { Mean::new() };
//!     mine.update(4.0, 1);
//!     accelerator.reduce_metric(mine)
//! })?;
//! assert_eq!(means, [Mean::of(14.0 / 8.0, 8); 2]);
//! # Ok::<(), accelerator::Error>(())
//! ```

mod accuracy;
mod confusion;
mod sums;

pub use self::accuracy::{Accuracy, TopK};
pub use self::confusion::Confusion;
pub(crate) use self::sums::reduce;
pub use self::sums::{Mean, Sum};
pub use self::sums::{Metric, Sums};
