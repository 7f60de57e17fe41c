//! The control vector: numbers that ranks sum with each window, beside the gradients.

use accelerator_collective::{Buffer, ProcessGroup};
use accelerator_plan::mix;

use super::pace;
use crate::core::error::{Error, Kind, Result};

/// The length of a control vector: the header, a flag for each parameter and bucket, the trigger, and the paces of the
/// ranks.
pub(super) fn length(parameters: usize, buckets: usize, ranks: usize) -> usize {
    HEADER + parameters + buckets + 1 + pace::length(ranks)
}

pub(super) const HEADER: usize = size_of::<ControlHeader>() / size_of::<f64>();

/// The numbers before the flags: of one rank, or summed over all ranks.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ControlHeader {
    pub(super) weight: f64,
    /// Σ weight · loss.
    pub(super) loss: f64,
    pub(super) window: WindowFingerprint,
    pub(super) batches: WindowFingerprint,
    pub(super) losses: WindowFingerprint,
    /// The number of ranks that ask for the norm.
    pub(super) norm: f64,
}

impl ControlHeader {
    fn read(values: &[f64]) -> Self {
        let mut header = Self::default();
        let mut values = values.iter();
        header.for_each_number(|number| *number = values.next().copied().unwrap_or_default());
        header
    }

    pub(super) fn write(mut self, values: &mut [f64]) {
        let mut values = values.iter_mut();
        self.for_each_number(|number| values.next().into_iter().for_each(|value| *value = *number));
    }

    /// Visits all numbers, in the order in which they are sent.
    fn for_each_number(&mut self, visit: impl FnMut(&mut f64)) {
        let Self {
            weight,
            loss,
            window,
            batches,
            losses,
            norm,
        } = self;
        let fingerprints = [window, batches, losses].into_iter();
        let numbers = fingerprints.flat_map(|fingerprint| fingerprint.0.iter_mut());
        [weight, loss, norm]
            .into_iter()
            .chain(numbers)
            .for_each(visit);
    }
}

/// A hash that ranks compare by its sum: how many ranks send a hash, the sum of the hashes, and the sum of the hashes of
/// these hashes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct WindowFingerprint([f64; 3]);

impl WindowFingerprint {
    /// The fingerprint of one of `ranks` ranks; `None` is not compared.
    pub(super) fn of(ranks: usize, numbers: Option<&[u64]>) -> Self {
        numbers.map_or_else(Self::default, |numbers| {
            let hash = bounded_hash(ranks, numbers);
            let second = bounded_hash(ranks, &[hash]);
            Self([1.0, hash as f64, second as f64])
        })
    }

    /// Returns `true` if all ranks that sent a hash sent the same one, and `wanted` ranks did. Equal hashes are equal
    /// to their mean, and so are their second hashes. All ranks have the same sums, and so the same result.
    fn all_equal(self, ranks: usize, wanted: Option<usize>) -> bool {
        let [senders, hashes, seconds] = self.0;
        let mean = (hashes as u64)
            .checked_div(senders as u64)
            .unwrap_or_default();
        let second = bounded_hash(ranks, &[mean]);
        wanted.is_none_or(|wanted| senders == wanted as f64)
            && mean as f64 * senders == hashes
            && second as f64 * senders == seconds
    }
}

/// A hash of `numbers` in so few bits that the sum over the ranks is exact in an `f64`.
fn bounded_hash(ranks: usize, numbers: &[u64]) -> u64 {
    mix(numbers) % ((1 << f64::MANTISSA_DIGITS) / ranks as u64)
}

#[derive(Clone, Copy, Debug)]
pub(super) struct ControlSums<'a> {
    pub(super) header: ControlHeader,
    /// The number of ranks that have a gradient, by parameter.
    pub(super) present: &'a [f64],
    /// The number of ranks that ask for another reduction, by bucket.
    needs_retry: &'a [f64],
    /// The number of the `Trigger`.
    pub(super) trigger: f64,
    /// The reports of all ranks for [`Pace`](super::pace::Pace).
    pub(super) paces: &'a [f64],
}

impl<'a> ControlSums<'a> {
    /// Splits the reduced control vector of a window with `parameters` parameters.
    pub(super) fn read(
        control: &'a Option<Buffer>,
        parameters: usize,
        group: &ProcessGroup,
    ) -> Result<Self> {
        let values = match control {
            Some(control) => control.as_slice::<f64>()?,
            None => &[],
        };
        let paces = pace::length(group.world_size());
        let (values, paces) = values.split_at(values.len().saturating_sub(paces));
        let Some((header, [flags @ .., trigger])) = values.split_at_checked(HEADER) else {
            return Err(Error::new(
                Kind::Collective,
                "the reduction of a window was given up before its control vector was received",
            ));
        };
        let (present, needs_retry) = flags.split_at(parameters.min(flags.len()));
        Ok(Self {
            header: ControlHeader::read(header),
            present,
            needs_retry,
            trigger: *trigger,
            paces,
        })
    }

    pub(super) fn wants_norm(&self) -> bool {
        self.header.norm > 0.0
    }

    /// Returns for each bucket whether any rank asks for another reduction.
    pub(super) fn needs_retry(&self) -> impl Iterator<Item = bool> {
        self.needs_retry.iter().map(|ranks| *ranks > 0.0)
    }

    /// Checks if the windows of all ranks have the same length, model and batches, and no rank has missed a window.
    pub(super) fn windows_agree(&self, group: &ProcessGroup) -> bool {
        let ranks = group.world_size();
        let ControlHeader {
            window, batches, ..
        } = self.header;
        window.all_equal(ranks, Some(ranks)) && batches.all_equal(ranks, None)
    }

    /// Checks if all ranks have sent a loss, and the same one to the bit.
    pub(super) fn losses_agree(&self, group: &ProcessGroup) -> bool {
        let ranks = group.world_size();
        ranks > 1 && self.header.losses.all_equal(ranks, Some(ranks))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The result of ranks in these windows.
    fn agree(windows: &[[u64; 3]]) -> bool {
        agree_beside(0, windows)
    }

    /// The same, with `silent` more ranks that send no hash.
    fn agree_beside(silent: usize, windows: &[[u64; 3]]) -> bool {
        let ranks = windows.len() + silent;
        let sent = windows.iter().map(|window| Some(&window[..]));
        let sent = sent.chain(core::iter::repeat_n(None, silent));
        let sums = sent.fold(WindowFingerprint::default(), |sums, window| {
            let WindowFingerprint(mine) = WindowFingerprint::of(ranks, window);
            WindowFingerprint(core::array::from_fn(|at| sums.0[at] + mine[at]))
        });
        let (all, agrees) = (
            sums.all_equal(ranks, Some(ranks)),
            sums.all_equal(ranks, None),
        );
        assert_eq!(all, agrees && silent == 0);
        agrees
    }

    proptest! {
        #[test]
        fn ranks_agree_where_all_of_them_are_in_one_window(
            window: [u64; 3],
            others in proptest::collection::vec(any::<[u64; 3]>(), 1..4),
            ranks in 1_usize..5000,
            silent in 0_usize..5000,
        ) {
            let mut windows = vec![window; ranks];
            prop_assert!(agree(&windows) && agree_beside(silent, &windows) && agree_beside(silent + 1, &[]));
            windows.extend(others);
            prop_assert!(!agree(&windows) && !agree_beside(silent, &windows));
        }
    }

    #[test]
    fn windows_that_differ_in_one_number_do_not_agree() {
        let window = [7, 3, 0];
        for at in 0..3 {
            let mut other = window;
            other[at] += 1;
            assert!(!agree(&[window, other]) && !agree(&[window, other, window]));
        }
    }
}
