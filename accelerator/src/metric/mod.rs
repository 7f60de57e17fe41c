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
//!     let (loss, confusion) = accelerator.reduce((loss, confusion))?;
//!     Ok((loss.samples(), confusion.accuracy()))
//! })?;
//! assert_eq!(figures, [(6.0, 2.0 / 3.0); 2]);
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
/// time only; [`Accelerator::reduce`](crate::Accelerator::reduce) makes sure that all ranks have
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
/// let all = accelerator.reduce(mine)?;
/// # assert_eq!(all.counts.len(), 256);
/// # Ok::<(), accelerator::Error>(())
/// ```
pub trait Metric {
    /// Shows its sums: first they are read, then overwritten with those of all ranks.
    fn sums(&mut self, sums: &mut Sums<'_>);
}

macro_rules! tuples {
    ($($metric:ident),+) => {
        impl<$($metric: Metric),+> Metric for ($($metric,)+) {
            #[allow(non_snake_case, reason = "the names are those of the type parameters")]
            fn sums(&mut self, sums: &mut Sums<'_>) {
                let ($($metric,)+) = self;
                $($metric.sums(sums);)+
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
}
