use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use accelerator_collective::{Buffer, ProcessGroup};

use super::bucket::Buckets;
use super::window::Window;
use crate::model::Trainable;

/// What is kept for a prepared model: which gradients it has, where they lie, and the window
/// that is open.
#[derive(Debug)]
pub(crate) struct Slot {
    pub(super) buckets: Buckets,
    parameters: Vec<Trainable>,
    /// Whether a gradient that only other ranks had was reported.
    reported: AtomicBool,
    spare: Mutex<Vec<Vec<Buffer>>>,
    /// How many windows ended, over the whole job.
    steps: AtomicU64,
    window: Mutex<Window>,
}

impl Slot {
    pub(crate) fn new(parameters: Vec<Trainable>, bucket_size: usize) -> Self {
        Self {
            steps: AtomicU64::new(0),
            buckets: Buckets::new(&parameters, bucket_size),
            window: Mutex::new(Window::default()),
            reported: AtomicBool::new(false),
            spare: Mutex::new(Vec::new()),
            parameters,
        }
    }

    /// For a model that was trained for so many steps before.
    pub(crate) fn with_steps(self, steps: u64) -> Self {
        Self {
            steps: AtomicU64::new(steps),
            ..self
        }
    }

    pub(crate) fn parameters(&self) -> &[Trainable] {
        &self.parameters
    }

    /// How many windows ended, over the whole job.
    pub(crate) fn steps(&self) -> u64 {
        self.steps.load(Ordering::Relaxed)
    }

    /// A window has ended well.
    pub(super) fn count_step(&self) {
        self.steps.fetch_add(1, Ordering::Relaxed);
    }

    /// How many micro-steps of the next step are done.
    pub(crate) fn open_micro_steps(&self) -> usize {
        self.window().micro_steps()
    }

    /// Says once, by path, that this rank had no gradient for a parameter that others trained.
    pub(super) fn report_missing(&self, written: &[bool], present: &[bool]) {
        let missing = self.parameters.iter().zip(written.iter().zip(present));
        let paths: Vec<_> = missing
            .filter(|(_, (written, present))| !**written && **present)
            .map(|(parameter, _)| parameter.path.as_str())
            .collect();
        if !paths.is_empty() && !self.reported.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                ?paths,
                "these parameters had no gradient on this rank, and one on others: it counted \
                 as zeros here (said once)"
            );
        }
    }

    pub(super) fn window(&self) -> MutexGuard<'_, Window> {
        self.window.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Buffers to fill: used ones where there are some, since their pages are warm.
    pub(super) fn lend(&self, group: &ProcessGroup) -> Vec<Buffer> {
        let spare = self
            .spare
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .pop();
        spare.unwrap_or_else(|| self.buckets.allocate(group))
    }

    pub(super) fn take_back(&self, buffers: Vec<Buffer>) {
        self.spare
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(buffers);
    }
}
