//! Figures that are summed on each rank and reduced once.
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
mod mean;
mod sum;
mod sums;
mod top_k;

pub use self::accuracy::Accuracy;
pub use self::confusion::Confusion;
pub use self::mean::Mean;
pub use self::sum::Sum;
pub use self::sums::Sums;
pub(crate) use self::sums::reduce;
pub use self::top_k::TopK;

/// A figure that can be put together from sums over samples, so that the sums of all ranks give
/// it over all samples. Tuples of metrics are metrics.
///
/// One method shows every sum, always in the same order. How many there are may be known at run
/// time only; [`Accelerator::reduce_metric`](crate::Accelerator::reduce_metric) makes sure that all ranks have
/// the same.
///
/// ```
/// use accelerator::metric::{Metric, Sums};
///
/// /// How often each byte came.
/// struct Histogram { counts: Vec<f64>, total: f64 }
///
/// impl Metric for Histogram {
///     fn sums(&mut self, sums: &mut Sums<'_>) {
///         sums.all(&mut self.counts);
///         sums.one(&mut self.total);
///     }
/// }
///
/// let accelerator = accelerator::Accelerator::new()?;
/// let mine = Histogram { counts: vec![0.0; 256], total: 0.0 };
/// let all = accelerator.reduce_metric(mine)?;
/// # assert_eq!(all.counts.len(), 256);
/// # Ok::<(), accelerator::Error>(())
/// ```
pub trait Metric {
    /// Shows its sums: first they are read, then overwritten with those of all ranks.
    fn sums(&mut self, sums: &mut Sums<'_>);

    /// Returns a name by which ranks that reduce different metrics with as many sums are found out: that
    /// of the type, unless it says more.
    ///
    /// ```
    /// use accelerator::metric::{Metric, Sums};
    ///
    /// /// Hits within a distance, which all ranks must mean alike.
    /// struct Within { distance: f64, hits: f64 }
    ///
    /// impl Metric for Within {
    ///     fn sums(&mut self, sums: &mut Sums<'_>) {
    ///         sums.one(&mut self.hits);
    ///     }
    ///
    ///     fn name(&self) -> String {
    ///         format!("within {}", self.distance)
    ///     }
    /// }
    ///
    /// let errors = accelerator::launch(2, |accelerator| {
    ///     let mine = Within { distance: accelerator.rank() as f64, hits: 3.0 };
    ///     Ok(accelerator.reduce_metric(mine).err())
    /// })?;
    /// assert!(errors.into_iter().flatten().all(|error| error.is_misuse()));
    /// # Ok::<(), accelerator::Error>(())
    /// ```
    fn name(&self) -> String {
        short(core::any::type_name::<Self>())
    }
}

/// The name of a type without the paths of modules.
fn short(name: &str) -> String {
    let mut short = String::new();
    // An identifier that a path follows is a module.
    for part in name.split_inclusive(|c: char| !(c.is_alphanumeric() || c == '_' || c == ':')) {
        short.push_str(part.rsplit("::").next().unwrap_or(part));
    }
    short
}

macro_rules! tuples {
    ($($metric:ident),+) => {
        impl<$($metric: Metric),+> Metric for ($($metric,)+) {
            #[allow(non_snake_case, reason = "the names are those of the type parameters")]
            fn sums(&mut self, sums: &mut Sums<'_>) {
                let ($($metric,)+) = self;
                $($metric.sums(sums);)+
            }

            #[allow(non_snake_case, reason = "the names are those of the type parameters")]
            fn name(&self) -> String {
                let ($($metric,)+) = self;
                let names = [$($metric.name()),+];
                format!("({})", names.join(", "))
            }
        }
    };
}

tuples!(A);
tuples!(A, B);
tuples!(A, B, C);
tuples!(A, B, C, D);
tuples!(A, B, C, D, E);
tuples!(A, B, C, D, E, F);

impl<M: Metric> Metric for Vec<M> {
    fn sums(&mut self, sums: &mut Sums<'_>) {
        self.iter_mut().for_each(|metric| metric.sums(sums));
    }

    fn name(&self) -> String {
        let names: Vec<_> = self.iter().map(Metric::name).collect();
        match names.first() {
            Some(first) if names.iter().all(|name| name == first) => {
                format!("[{first}; {}]", names.len())
            }
            _ => format!("[{}]", names.join(", ")),
        }
    }
}
