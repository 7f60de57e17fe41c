use super::Anchors;
use super::agree::RankCalibration;
use super::ready_order::FlushPoint;
use super::report::{OverlapReport, OverlapState};

/// Whether buckets are to be sent while backward runs: the same on all ranks.
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

/// What is known about when a model's gradients are ready. All ranks go from phase to phase
/// together, at the end of a window.
#[derive(Debug)]
pub(in crate::reduce) struct OverlapScheduler {
    pub(super) anchors: Anchors,
    pub(super) phase: SchedulerPhase,
    /// In the last window: buckets, and how many were sent before backward ended.
    pub(super) buckets: usize,
    pub(super) early: usize,
    /// In all windows in which buckets could be sent early, and how many these were.
    pub(super) early_total: u64,
    pub(super) windows: u64,
    pub(super) repairs: u32,
}

#[derive(Debug)]
pub(super) enum SchedulerPhase {
    Off,
    /// When gradients are ready is not known to all ranks yet.
    Calibrating(RankCalibration),
    /// Buckets are sent at these points.
    Sending(Vec<FlushPoint>),
    /// What was ready changed too often.
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
