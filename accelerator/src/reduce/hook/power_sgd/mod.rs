mod factors;
mod matrix;
mod rng;
mod saved_state;

use self::factors::{PendingFactors, PowerSgdState};
use super::{BucketValues, CommunicationHook, GradientBucket, HookError, Ranks, SavedBy};

/// Sends gradients as products of thin matrices: PowerSGD (Vogels, Karimireddy, Jaggi 2019, "PowerSGD:
/// Practical Low-Rank Gradient Compression for Distributed Optimization").
///
/// The gradient of a parameter is read as a matrix of `rows`, its first dimension, by `columns`, all others
/// together. Of `rows · columns` values, `rank · (rows + columns)` travel: one step of a power iteration
/// finds the directions in which the sum of all ranks is largest. In the paper's names, a gradient M is replaced by P · Qᵀ.
/// What is not sent is not lost: each rank adds its error, the part that was not sent, to its next gradient (error
/// feedback), and the iteration continues from the Q of the step before (warm start).
///
/// If it does not pay, for biases and small parameters among others, gradients are sent exactly. A bucket takes two
/// all-reduces: one of the exact values and each P, and one of each Q.
///
/// Each rank keeps its error of every compressed parameter, as much memory as the gradient has, and each Q. They go into
/// checkpoints: a run that continues with as many ranks repeats the bits of one that was not interrupted. With another number
/// of ranks, each Q is kept, and the errors start at zero.
///
/// Gradients are approximate, so losses differ from those of exact training; the learning rate and the
/// length of the exact beginning (`start_after`) are worth a look. Worth it where the network is slow
/// beside the gradients: the products cost about `4 · rank` operations an element.
///
/// | PyTorch's `PowerSGDState` | here | default there and here |
/// |---|---|---|
/// | `matrix_approximation_rank` | [`new`](Self::new) | 1 |
/// | `start_powerSGD_iter` | [`start_after`](Self::start_after) | 1000 |
/// | `min_compression_rate` | [`min_compression`](Self::min_compression) | 2 |
/// | `use_error_feedback=False` | [`without_error_feedback`](Self::without_error_feedback) | it is used |
/// | `warm_start=False` | [`without_warm_start`](Self::without_warm_start) | it is warm |
/// | `random_seed` | [`seed`](Self::seed) | 0 |
/// | `orthogonalization_epsilon` | nothing | columns that depend on others are found by what is left of them |
///
/// Ranks and checkpoints compare its name, which holds every setting.
#[derive(Debug)]
#[must_use]
pub struct PowerSgd {
    settings: PowerSgdSettings,
    start_after: u64,
    double: PowerSgdState<f64>,
    single: PowerSgdState<f32>,
}

#[derive(Clone, Copy, Debug)]
struct PowerSgdSettings {
    error_feedback: ErrorFeedback,
    min_compression: f64,
    rank: usize,
    seed: u64,
    start: IterationStart,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum ErrorFeedback {
    Off,
    On,
}

/// The start of each step's iteration.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum IterationStart {
    /// Random directions.
    Cold,
    /// The end of the step before.
    Warm,
}

impl PowerSgd {
    /// Creates the hook with factors of that many columns: 0 is taken as 1, and more than a gradient's rows or columns
    /// as these. 1 to 4 are usual.
    pub fn new(rank: usize) -> Self {
        Self {
            settings: PowerSgdSettings {
                error_feedback: ErrorFeedback::On,
                min_compression: 2.0,
                rank: rank.max(1),
                seed: 0,
                start: IterationStart::Warm,
            },
            start_after: 1000,
            double: PowerSgdState::default(),
            single: PowerSgdState::default(),
        }
    }

    /// Sets the number of the job's steps that are reduced exactly, before any is compressed: gradients of the first
    /// steps are large and change fast. Default: 1000, as in PyTorch.
    pub fn start_after(mut self, steps: u64) -> Self {
        self.start_after = steps;
        self
    }

    /// Sets how many times fewer values must travel for a parameter to be compressed; with 0, every parameter of
    /// two or more dimensions is. Default: 2.
    pub fn min_compression(mut self, times: f64) -> Self {
        self.settings.min_compression = times;
        self
    }

    /// Sets the seed of the random directions, which are drawn from it and the parameter's path. Default: 0.
    pub fn seed(mut self, seed: u64) -> Self {
        self.settings.seed = seed;
        self
    }

    /// Forgets what was not sent. It saves memory, and training may not converge.
    pub fn without_error_feedback(mut self) -> Self {
        self.settings.error_feedback = ErrorFeedback::Off;
        self
    }

    /// Begins each step at random directions. Nothing but the errors is kept from step to step, and the
    /// approximation is worse.
    pub fn without_warm_start(mut self) -> Self {
        self.settings.start = IterationStart::Cold;
        self
    }
}

impl CommunicationHook for PowerSgd {
    fn name(&self) -> String {
        let PowerSgdSettings {
            error_feedback,
            min_compression,
            rank,
            seed,
            start,
        } = self.settings;
        let feedback = match error_feedback {
            ErrorFeedback::Off => "no error feedback",
            ErrorFeedback::On => "error feedback",
        };
        let start = match start {
            IterationStart::Cold => "cold",
            IterationStart::Warm => "warm",
        };
        format!(
            "PowerSGD of rank {rank} after {} steps, {start} start, {feedback}, where it saves \
             {min_compression} times, seed {seed}",
            self.start_after
        )
    }

    fn reduce(
        &mut self,
        bucket: &mut GradientBucket<'_>,
        ranks: &Ranks<'_>,
    ) -> Result<(), HookError> {
        let step = bucket.step();
        let sent = if step < self.start_after {
            PendingFactors::Nothing
        } else {
            let settings = &self.settings;
            match bucket.parts_mut() {
                (parameters, BucketValues::F32(values)) => self
                    .single
                    .reduce(settings, step, parameters, values, ranks)?,
                (parameters, BucketValues::F64(values)) => self
                    .double
                    .reduce(settings, step, parameters, values, ranks)?,
            }
        };
        match sent {
            PendingFactors::Nothing => Ok(bucket.all_reduce(ranks)?),
            PendingFactors::Everything => Ok(()),
        }
    }

    fn save(&self) -> Result<Vec<u8>, HookError> {
        saved_state::save(&self.single, &self.double)
    }

    fn restore(&mut self, saved: &[u8], saved_by: SavedBy) -> Result<(), HookError> {
        saved_state::restore(saved, saved_by, &mut self.single, &mut self.double)
    }
}

#[cfg(test)]
mod tests;
