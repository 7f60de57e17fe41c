use core::fmt;
use core::str::FromStr;

use super::Anchors;
use super::ready_order::{FlushPoint, RankCalibration};
use crate::core::error::{Error, Result, named};

/// The switch to send buckets while backward runs: the same on all ranks.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum OverlapSwitch {
    Off,
    On,
}

impl OverlapSwitch {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::On => "on",
        }
    }
}

/// The knowledge about when a model's gradients are ready. All ranks go from phase to phase
/// together, at the end of a window.
#[derive(Debug)]
pub(in crate::reduce) struct OverlapScheduler {
    pub(super) anchors: Anchors,
    pub(super) phase: SchedulerPhase,
    /// The counts of the report; its state follows from the phase.
    pub(super) counts: OverlapReport,
}

#[derive(Debug)]
pub(super) enum SchedulerPhase {
    /// Buckets are sent afterwards; the reason is one of the states of the report.
    Off(OverlapState),
    /// Not all ranks know yet when gradients are ready.
    Calibrating(RankCalibration),
    /// Buckets are sent at these points.
    Sending(Vec<FlushPoint>),
    /// The set of ready gradients changed too often.
    GivenUp,
}

impl OverlapScheduler {
    pub(in crate::reduce) fn new(switch: OverlapSwitch) -> Self {
        Self {
            anchors: Anchors::default(),
            phase: match switch {
                OverlapSwitch::Off => SchedulerPhase::Off(OverlapState::Off),
                OverlapSwitch::On => SchedulerPhase::Calibrating(RankCalibration::new()),
            },
            counts: OverlapReport {
                state: OverlapState::Off,
                buckets: 0,
                early: 0,
                late: 0,
                early_total: 0,
                windows: 0,
                repairs: 0,
            },
        }
    }

    /// Sends nothing while backward runs, since layers of this program exchange data in it, or the program runs it.
    pub(in crate::reduce) fn give_way(&mut self) {
        if !matches!(self.phase, SchedulerPhase::Off(_)) {
            tracing::debug!("overlap is {}", OverlapState::GivesWay);
            self.phase = SchedulerPhase::Off(OverlapState::GivesWay);
        }
    }

    pub(in crate::reduce) fn report(&self) -> OverlapReport {
        let watched = match &self.phase {
            SchedulerPhase::Sending(points) => points.iter().map(|point| point.buckets.len()).sum(),
            _ => 0,
        };
        OverlapReport {
            late: self.counts.buckets.saturating_sub(watched),
            state: match self.phase {
                SchedulerPhase::Off(state) => state,
                SchedulerPhase::Calibrating(_) => OverlapState::Learning,
                SchedulerPhase::Sending(_) => OverlapState::On,
                SchedulerPhase::GivenUp => OverlapState::GivenUp,
            },
            ..self.counts
        }
    }
}

/// Decides whether gradients are sent while backward still computes others.
///
/// It changes when bytes travel, and nothing else: results have the same bits. As text, the settings have the
/// names of `ACCEL_OVERLAP`.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum Overlap {
    /// On if ranks are on several hosts, or compute on CUDA devices. On the CPUs of one host there is little
    /// to hide, and ranks that compute on all of its cores have none left over for sending.
    #[default]
    Auto,
    /// Sends buckets once backward has ended.
    Off,
    /// Sends buckets as soon as gradients are ready, if there is more than one rank.
    On,
}

impl Overlap {
    const ALL: [Self; 3] = [Self::Auto, Self::Off, Self::On];
}

impl fmt::Display for Overlap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Off => "off",
            Self::On => "on",
        })
    }
}

impl FromStr for Overlap {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        named("overlap", name, &Self::ALL)
    }
}

/// A report on how a model's gradients are sent; see
/// [`Accelerator::overlap_report`](crate::Accelerator::overlap_report).
///
/// [`On`](OverlapState::On) says that buckets may go early, and the counts say whether they did: a bucket
/// goes with the end of backward where backward is over before it could leave. With
/// [`Compression`](crate::Compression), no bucket leaves before all ranks have told their weights, so that
/// a backward that is shorter than this exchange sends nothing early, ever. `early_total` of 0 after many
/// `windows` tells.
///
/// ```
/// use accelerator::{Accelerator, Overlap, OverlapState};
/// # use burn::nn::{Linear, LinearConfig};
/// # use burn::tensor::Tensor;
///
/// let reports = Accelerator::builder().overlap(Overlap::On).launch(2, |accelerator| {
/// #     let device = accelerator.device();
/// #     let model: Linear = accelerator.init(|device| LinearConfig::new(2, 1).init(device));
/// #     let model = accelerator.prepare(model)?;
///     let loss = model.forward(Tensor::<2>::ones([4, 2], &device)).mean();
///     let gradients = accelerator.backward(loss, &model, 4)?;
/// #     let _ = gradients;
///     accelerator.overlap_report(&model)
/// })?;
/// // What is ready when is not known after one step.
/// assert_eq!(reports[0].state, OverlapState::Learning);
/// assert_eq!((reports[0].buckets, reports[0].early), (1, 0));
/// assert_eq!((reports[0].windows, reports[0].early_total, reports[0].repairs), (0, 0, 0));
/// assert_eq!(reports[0].to_string(), "overlap is learning which gradients are ready when");
/// # Ok::<(), accelerator::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct OverlapReport {
    /// The state of sending buckets while backward runs.
    pub state: OverlapState,
    /// The number of buckets of the last window; 0 before the first one.
    pub buckets: usize,
    /// The number of those buckets that this rank began to send before its backward ended.
    pub early: usize,
    /// The number of buckets with a gradient that is complete only when backward ends: these are never early. If there
    /// are many, [`OverlapState::NothingEarly`] tells why.
    pub late: usize,
    /// The sum of `early` over all `windows`.
    pub early_total: u64,
    /// The number of windows sent since sending buckets early was allowed.
    pub windows: u64,
    /// The number of steps in which a rank had sent a bucket before it was complete, so it was reduced once more.
    pub repairs: u32,
}

impl fmt::Display for OverlapReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            state,
            buckets,
            early,
            late,
            ..
        } = self;
        write!(f, "overlap is {state}")?;
        if matches!(state, OverlapState::On | OverlapState::GivenUp) {
            write!(
                f,
                "; of {buckets} buckets, {early} were sent before backward ended, and {late} never are"
            )?;
        }
        Ok(())
    }
}

/// Tells if buckets are sent while backward runs, and if not, why. The text of a state says what would turn overlap on.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum OverlapState {
    /// Buckets are sent afterwards: as the settings say, because there is one rank, or by a
    /// [communication hook](crate::hook::CommunicationHook).
    Off,
    /// Buckets are sent afterwards: layers exchange data in backward, as
    /// [`SyncBatchNorm`](crate::nn::SyncBatchNorm) does, or the program runs backward itself.
    GivesWay,
    /// Buckets are sent afterwards: no gradient of the model is complete before backward ends.
    ///
    /// If an operation takes a view of a weight, as Burn's `Linear` does if its input has three dimensions, and its rows
    /// are a multiple of 32, the gradient is complete only at the end of backward.
    /// [`Units::Keep`](crate::nn::Units::Keep) completes the gradients of a block when backward leaves it.
    NothingEarly,
    /// The first two windows in which each rank has samples tell which gradients are ready when.
    Learning,
    /// Buckets are sent while backward runs.
    On,
    /// Buckets were sent while backward ran, but the model's graph changes too much from step to step.
    GivenUp,
}

impl fmt::Display for OverlapState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Off => "off, as the settings say, because there is one rank, or by a communication hook",
            Self::GivesWay => {
                "off: layers exchange data in backward, as SyncBatchNorm does, or the program runs it"
            }
            Self::NothingEarly => {
                "off: no gradient is complete before backward ends; blocks in `nn::Unit`s with `Units::Keep` complete \
                 theirs when backward leaves them"
            }
            Self::Learning => "learning which gradients are ready when",
            Self::On => "on",
            Self::GivenUp => "given up: the model's graph changes too much from step to step",
        })
    }
}
