//! The vector that ranks add up beside their gradients, by which each learns of the others.

use accelerator_collective::{Buffer, ProcessGroup};
use accelerator_plan::mix;

use crate::core::error::{Error, Kind, Result};

/// How many numbers a control vector has.
pub(super) fn length(parameters: usize, buckets: usize) -> usize {
    HEADER + parameters + buckets + 1
}

/// How many stand in front of the flags.
pub(super) const HEADER: usize = size_of::<ControlHeader>() / size_of::<f64>();

/// What stands in front of the flags: of one rank, or the sums over all of them.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ControlHeader {
    pub(super) weight: f64,
    /// Σ weight · loss.
    pub(super) loss: f64,
    pub(super) window: WindowFingerprint,
    pub(super) batches: WindowFingerprint,
    pub(super) losses: WindowFingerprint,
    /// How many ranks want the norm.
    pub(super) norm: f64,
}

impl ControlHeader {
    fn read(values: &[f64]) -> Self {
        let mut header = Self::default();
        let mut values = values.iter();
        header.each(|number| *number = values.next().copied().unwrap_or_default());
        header
    }

    pub(super) fn write(mut self, values: &mut [f64]) {
        let mut values = values.iter_mut();
        self.each(|number| values.next().into_iter().for_each(|value| *value = *number));
    }

    /// All numbers, in the order in which they are sent.
    fn each(&mut self, visit: impl FnMut(&mut f64)) {
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

/// What ranks compare: how many of them send a fingerprint, the sum of the fingerprints, and the sum of their echoes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct WindowFingerprint([f64; 3]);

impl WindowFingerprint {
    /// What one of so many ranks sends; `None` is not compared.
    pub(super) fn of(ranks: usize, numbers: Option<&[u64]>) -> Self {
        numbers.map_or_else(Self::default, |numbers| {
            let fingerprint = bounded(ranks, numbers);
            let echo = bounded(ranks, &[fingerprint]);
            Self([1.0, fingerprint as f64, echo as f64])
        })
    }

    /// Whether all that was sent is one fingerprint, and of as many ranks as are `wanted`. Where it is one, it is the
    /// mean, and so is its echo. All ranks see the same sums, and come to the same.
    fn is_one(self, ranks: usize, wanted: Option<usize>) -> bool {
        let [senders, fingerprints, echoes] = self.0;
        let mean = (fingerprints as u64)
            .checked_div(senders as u64)
            .unwrap_or_default();
        let echo = bounded(ranks, &[mean]);
        wanted.is_none_or(|wanted| senders == wanted as f64)
            && mean as f64 * senders == fingerprints
            && echo as f64 * senders == echoes
    }
}

/// A number of these in as many bits as leave the sum over the ranks exact in an `f64`.
fn bounded(ranks: usize, numbers: &[u64]) -> u64 {
    mix(numbers) % ((1 << f64::MANTISSA_DIGITS) / ranks as u64)
}

/// What all ranks have told each other in a control vector: sums over them.
#[derive(Clone, Copy, Debug)]
pub(super) struct ControlSums<'a> {
    pub(super) header: ControlHeader,
    /// By parameter: how many ranks have a gradient.
    pub(super) present: &'a [f64],
    /// By bucket: on how many ranks something is odd about it.
    needs_retry: &'a [f64],
    /// What `Trigger` tells.
    pub(super) trigger: f64,
}

impl<'a> ControlSums<'a> {
    /// What came of a window of so many parameters.
    pub(super) fn read(control: &'a Option<Buffer>, parameters: usize) -> Result<Self> {
        let values = match control {
            Some(control) => control.as_slice::<f64>()?,
            None => &[],
        };
        let Some((header, [flags @ .., trigger])) = values.split_at_checked(HEADER) else {
            return Err(Error::new(
                Kind::Collective,
                "what ranks tell each other of a window was given up before it came",
            ));
        };
        let (present, needs_retry) = flags.split_at(parameters.min(flags.len()));
        Ok(Self {
            header: ControlHeader::read(header),
            present,
            needs_retry,
            trigger: *trigger,
        })
    }

    pub(super) fn wants_norm(&self) -> bool {
        self.header.norm > 0.0
    }

    /// By bucket: whether something is odd about it on some rank.
    pub(super) fn needs_retry(&self) -> impl Iterator<Item = bool> {
        self.needs_retry.iter().map(|ranks| *ranks > 0.0)
    }

    /// Whether windows of the same length, of the same model and the same batches, ended on all ranks, none of which
    /// has missed one.
    pub(super) fn windows_agree(&self, group: &ProcessGroup) -> bool {
        let ranks = group.world_size();
        let ControlHeader {
            window, batches, ..
        } = self.header;
        window.is_one(ranks, Some(ranks)) && batches.is_one(ranks, None)
    }

    /// Whether all ranks have told a loss, which is the same to the bit.
    pub(super) fn losses_agree(&self, group: &ProcessGroup) -> bool {
        let ranks = group.world_size();
        ranks > 1 && self.header.losses.is_one(ranks, Some(ranks))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What ranks come to that are in these windows.
    fn agree(windows: &[[u64; 3]]) -> bool {
        agree_beside(0, windows)
    }

    /// The same, where there are so many more that tell nothing.
    fn agree_beside(silent: usize, windows: &[[u64; 3]]) -> bool {
        let ranks = windows.len() + silent;
        let told = windows.iter().map(|window| Some(&window[..]));
        let told = told.chain(core::iter::repeat_n(None, silent));
        let sums = told.fold(WindowFingerprint::default(), |sums, window| {
            let WindowFingerprint(mine) = WindowFingerprint::of(ranks, window);
            WindowFingerprint(core::array::from_fn(|at| sums.0[at] + mine[at]))
        });
        let (all, agrees) = (sums.is_one(ranks, Some(ranks)), sums.is_one(ranks, None));
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
    fn windows_that_differ_in_one_number_are_told_apart() {
        let window = [7, 3, 0];
        for at in 0..3 {
            let mut other = window;
            other[at] += 1;
            assert!(!agree(&[window, other]) && !agree(&[window, other, window]));
        }
    }
}
