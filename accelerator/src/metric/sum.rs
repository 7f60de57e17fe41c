use core::fmt;

use serde::{Deserialize, Serialize};

use super::{Metric, Sums};

/// A total, over all samples of all ranks: of tokens, of seconds, or of how often something came.
///
/// ```
/// use accelerator::metric::Sum;
///
/// let totals = accelerator::launch(2, |accelerator| {
///     let (mut tokens, mut skipped) = (Sum::new(), Sum::new());
///     tokens.update(100.0 + accelerator.rank() as f64);
///     skipped.count(1);
///     let (tokens, skipped) = accelerator.reduce_metric((tokens, skipped))?;
///     Ok((tokens.value(), skipped.value()))
/// })?;
/// assert_eq!(totals, [(201.0, 2.0); 2]);
/// # Ok::<(), accelerator::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Sum(f64);

impl Sum {
    /// A sum of nothing yet: 0.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a value.
    pub fn update(&mut self, value: f64) {
        self.0 += value;
    }

    /// Adds a number of things. Counts are exact up to 2⁵³.
    pub fn count(&mut self, things: usize) {
        self.0 += things as f64;
    }

    /// The sum so far.
    pub fn value(&self) -> f64 {
        self.0
    }
}

impl fmt::Display for Sum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl Metric for Sum {
    fn sums(&mut self, sums: &mut Sums<'_>) {
        sums.one(&mut self.0);
    }
}
