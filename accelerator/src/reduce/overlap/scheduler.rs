use super::Anchors;
use super::agree::RankCalibration;
use super::ready_order::FlushPoint;
use super::report::{OverlapReport, OverlapState};

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
    /// The buckets of the last window; `early` is the number of them that were sent before backward ended.
    pub(super) buckets: usize,
    pub(super) early: usize,
    /// The buckets sent early in all `windows` in which they could be.
    pub(super) early_total: u64,
    pub(super) windows: u64,
    pub(super) repairs: u32,
}

#[derive(Debug)]
pub(super) enum SchedulerPhase {
    Off,
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
                OverlapSwitch::Off => SchedulerPhase::Off,
                OverlapSwitch::On => SchedulerPhase::Calibrating(RankCalibration::new()),
            },
            buckets: 0,
            early: 0,
            early_total: 0,
            windows: 0,
            repairs: 0,
        }
    }

    /// Sends nothing while backward runs, since layers of this program exchange data in it, or the program runs it.
    pub(in crate::reduce) fn give_way(&mut self) {
        if !matches!(self.phase, SchedulerPhase::Off) {
            tracing::debug!(
                "gradients are sent when backward has ended: layers exchange data in it, or the program runs it"
            );
            self.phase = SchedulerPhase::Off;
        }
    }

    pub(in crate::reduce) fn report(&self) -> OverlapReport {
        OverlapReport {
            state: match self.phase {
                SchedulerPhase::Off => OverlapState::Off,
                SchedulerPhase::Calibrating(_) => OverlapState::Learning,
                SchedulerPhase::Sending(_) => OverlapState::On,
                SchedulerPhase::GivenUp => OverlapState::GivenUp,
            },
            buckets: self.buckets,
            early: self.early,
            early_total: self.early_total,
            windows: self.windows,
            repairs: self.repairs,
        }
    }
}
