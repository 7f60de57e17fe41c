use std::io::IsTerminal;

use accelerator_collective::Topology;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::accelerator::Accelerator;

/// A bar that shows how far a loop is (feature `progress`).
impl Accelerator {
    /// Returns a progress bar on rank 0's standard error. It is hidden on every other rank, and if standard error is
    /// not a terminal, for example a file or the launcher. Without a length it only counts.
    ///
    /// ```
    /// # use accelerator::prelude::*;
    /// # use burn::data::dataset::InMemDataset;
    /// let accelerator = Accelerator::new()?;
    /// # let loader = LoaderBuilder::from_fn(|items: Vec<u32>, _| items).build(InMemDataset::new(vec![1, 2, 3]));
    /// let train = accelerator.prepare(loader)?;
    /// let bar = accelerator.progress(train.steps());
    /// for batch in bar.wrap_iter(train.epoch(0)) {
    ///     let batch = batch?;
    ///     // As without.
    /// #   drop(batch);
    /// }
    /// assert_eq!(bar.position(), 3);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn progress(&self, len: impl Into<Option<u64>>) -> ProgressBar {
        let len = len.into();
        let place = match std::io::stderr().is_terminal() {
            true => StderrKind::Terminal,
            false => StderrKind::Elsewhere,
        };
        let target = match is_shown(self.topology(), place) {
            true => ProgressDrawTarget::stderr(),
            false => ProgressDrawTarget::hidden(),
        };
        let template = match len {
            Some(_) => "{bar:30} {pos}/{len} {per_sec} {eta} left {msg}",
            None => "{spinner} {pos} {per_sec} {msg}",
        };
        let bar = ProgressBar::with_draw_target(len, target);
        match ProgressStyle::with_template(template) {
            Ok(style) => bar.with_style(style),
            // A template of ours that cannot be read; the usual one can.
            Err(_) => bar,
        }
    }
}

/// The kind of file that standard error is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum StderrKind {
    Elsewhere,
    Terminal,
}

fn is_shown(topology: &Topology, place: StderrKind) -> bool {
    place == StderrKind::Terminal && topology.is_main()
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;

    #[test]
    fn rank_zero_shows_bars_and_only_on_a_terminal() {
        for rank in 0..4 {
            // Two hosts: the first rank of the other one is not the main one.
            let topology = Topology::new(rank, 4).unwrap();
            let topology = topology.with_local(rank % 2, 2).unwrap();
            assert_eq!(is_shown(&topology, StderrKind::Terminal), rank == 0);
            assert!(!is_shown(&topology, StderrKind::Elsewhere));
        }
        assert!(is_shown(&Topology::single(), StderrKind::Terminal));
    }

    #[test]
    fn bars_count_whether_or_not_they_are_shown() {
        let hidden = crate::launch(2, |accelerator| {
            let bar = accelerator.progress(3);
            let counted = bar.wrap_iter(0..3).count();
            assert_eq!((counted, bar.position()), (3, 3));
            Ok([bar.is_hidden(), accelerator.progress(None).is_hidden()])
        })
        .unwrap();
        assert_eq!(hidden[1], [true; 2]);
    }
}
