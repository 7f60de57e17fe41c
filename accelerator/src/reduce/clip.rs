use core::fmt;

/// A rule to clip gradients: see [`AveragedGradients::clip`](crate::AveragedGradients::clip).
///
/// ```
/// use accelerator::Clip;
///
/// // One L2 norm over everything, as `AveragedGradients::clip_norm(1.0)`.
/// let whole = Clip::norm(1.0);
/// // The largest magnitude.
/// let largest = Clip::norm(1.0).of_order(f64::INFINITY);
/// // The head by its own norm, whatever the rest does.
/// let head = Clip::norm(0.1).only(|path| path.starts_with("head."));
/// // Each element by itself.
/// let elements = Clip::value(0.5);
/// # let _ = (whole, largest, head, elements);
/// ```
#[must_use]
pub struct Clip<'a> {
    pub(super) limit: Limit,
    /// Selects parameters by path; `None` is all.
    chosen: Option<Chosen<'a>>,
}

type Chosen<'a> = Box<dyn Fn(&str) -> bool + 'a>;

#[derive(Clone, Copy, Debug)]
pub(super) enum Limit {
    Norm { max: f64, order: f64 },
    Value(f64),
}

impl<'a> Clip<'a> {
    /// Scales down by `max / (norm + 1e-6)` where the L2 norm is larger than `max`. A negative `max` is
    /// taken as 0.
    pub fn norm(max: f64) -> Self {
        Self {
            limit: Limit::Norm { max, order: 2.0 },
            chosen: None,
        }
    }

    /// Holds elements within `-max..=max`. A negative `max` is taken as 0; what is no number stays so.
    pub fn value(max: f64) -> Self {
        Self {
            limit: Limit::Value(max),
            chosen: None,
        }
    }

    /// Clips by the norm `(Σ |x|ᵖ)^(1/p)` of that order instead, which is positive; with an infinite one, by the
    /// largest magnitude. Means nothing for [`value`](Self::value).
    ///
    /// # Panics
    ///
    /// If `order` is not above 0: there is no such norm.
    pub fn of_order(mut self, order: f64) -> Self {
        assert!(
            order > 0.0,
            "expected an order of norm above 0, found {order}"
        );
        if let Limit::Norm { order: mine, .. } = &mut self.limit {
            *mine = order;
        }
        self
    }

    /// Clips only parameters with such paths (`layers.0.weight`): the norm is theirs, and only they are
    /// scaled. It must choose the same ones on every rank. If it chooses none, nothing is clipped, and a
    /// warning says so.
    pub fn only(mut self, chosen: impl Fn(&str) -> bool + 'a) -> Self {
        self.chosen = Some(Box::new(chosen));
        self
    }

    pub(super) fn covers(&self, path: &str) -> bool {
        self.chosen.as_ref().is_none_or(|chosen| chosen(path))
    }
}

impl fmt::Debug for Clip<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Clip")
            .field("limit", &self.limit)
            .field("some", &self.chosen.is_some())
            .finish()
    }
}
