use burn::backend::DispatchTensor;

use super::identity;

/// The largest number of depths of a backward pass to look at.
pub(super) const POINTS: usize = 64;

/// The depths at which to look, from the deepest to the shallowest, for a loss that is so deep.
pub(super) fn depths(loss: usize) -> Vec<usize> {
    let mut depths: Vec<usize> = (1..=POINTS)
        .rev()
        .map(|k| loss * k / (POINTS + 1))
        .collect();
    depths.dedup();
    depths.retain(|&depth| depth > 0);
    depths
}

/// Finds at which point each gradient is already what it is in the end.
///
/// A gradient that is there need not be complete: a parameter that is used twice gets a sum of
/// two. What was seen is held, and compared by identity.
#[derive(Debug)]
pub(super) struct Calibration {
    depths: Vec<usize>,
    flushed: Vec<Option<ObservedGradient>>,
}

#[derive(Debug)]
struct ObservedGradient {
    gradient: DispatchTensor,
    since: usize,
}

impl Calibration {
    /// Creates a calibration for so many parameters, and points at these depths.
    pub(super) fn new(parameters: usize, depths: Vec<usize>) -> Self {
        Self {
            depths,
            flushed: core::iter::repeat_with(|| None).take(parameters).collect(),
        }
    }

    /// Notes the parameters' gradients at the point of that number. Points come in order.
    pub(super) fn observe(
        &mut self,
        point: usize,
        gradients: impl Iterator<Item = Option<DispatchTensor>>,
    ) {
        for (flushed, gradient) in self.flushed.iter_mut().zip(gradients) {
            *flushed = match (flushed.take(), gradient) {
                (Some(flushed), Some(gradient)) if identity::same(&flushed.gradient, &gradient) => {
                    Some(flushed)
                }
                (_, gradient) => gradient.map(|gradient| ObservedGradient {
                    gradient,
                    since: point,
                }),
            };
        }
    }

    /// The depth of the first point at which each parameter's gradient was the one that it has in
    /// the end, which `is_final` tells; `None` if it was so at no point, or has none.
    pub(super) fn result(
        self,
        is_final: impl Fn(usize, &DispatchTensor) -> bool,
    ) -> Vec<Option<usize>> {
        let depths = self.depths;
        let flushed = self.flushed.into_iter().enumerate();
        flushed
            .map(|(parameter, flushed)| {
                let ObservedGradient { gradient, since } = flushed?;
                is_final(parameter, &gradient).then(|| depths[since])
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shallow_loss_is_looked_at_everywhere_and_a_deep_one_at_quantiles() {
        assert!(depths(0).is_empty());
        assert_eq!(depths(5), [4, 3, 2, 1]);
        let deep = depths(100_000);
        assert_eq!(deep.len(), POINTS);
        assert!(deep.is_sorted_by(|one, next| one > next));
        assert!(deep[0] < 100_000 && deep[POINTS - 1] > 0);
    }
}
