use std::time::Instant;

use tracing::span::EnteredSpan;

use super::event::Phase;
use super::recorder::Recorder;

/// A phase of the main thread, as long as it lives; for `tracing` as well, at the level `debug`.
pub(crate) struct Span<'a> {
    _entered: EnteredSpan,
    noted: Option<(&'a Recorder, Instant)>,
    phase: Phase,
}

impl<'a> Span<'a> {
    pub(super) fn enter(
        phase: Phase,
        rank: usize,
        step: u64,
        recorder: Option<&'a Recorder>,
    ) -> Self {
        let span = match phase {
            Phase::Backward => tracing::debug_span!("backward", rank, step),
            Phase::Copy(part) => tracing::debug_span!("copy_gradients", rank, step, %part),
            Phase::Optimizer => tracing::debug_span!("optimizer_step", rank, step),
            Phase::Reduce { part, bytes } => {
                tracing::debug_span!("all_reduce", rank, step, %part, bytes)
            }
        };
        Self {
            _entered: span.entered(),
            noted: recorder.map(|recorder| (recorder, recorder.enter(phase.kind()))),
            phase,
        }
    }
}

impl Drop for Span<'_> {
    fn drop(&mut self) {
        if let Some((recorder, start)) = self.noted {
            recorder.leave(self.phase.kind(), start, self.phase.detail());
        }
    }
}

/// A worker that loads a batch.
pub(super) struct LoadSpan<'a> {
    noted: Option<(&'a Recorder, Instant)>,
    worker: usize,
}

impl<'a> LoadSpan<'a> {
    pub(super) fn begin(worker: usize, recorder: Option<&'a Recorder>) -> Self {
        Self {
            noted: recorder.map(|recorder| (recorder, Instant::now())),
            worker,
        }
    }
}

impl Drop for LoadSpan<'_> {
    fn drop(&mut self) {
        if let Some((recorder, start)) = self.noted {
            recorder.loaded(self.worker, start);
        }
    }
}
