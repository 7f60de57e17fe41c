//! Plans of faults that are drawn, and replayed by their seeds.

use std::time::Duration;

use accelerator_fault::{Action, Fault, FaultPlan, Point, SaveStage};

/// The limits of a random plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bounds {
    /// The number of ranks, at least 1.
    pub(super) ranks: usize,
    /// The number of optimizer steps of the job.
    pub(super) steps: u64,
    /// The number of checkpoints of the job.
    pub(super) saves: u64,
    /// The most attempts that have a fault, one each, the first attempt among them.
    pub(super) restarts: u64,
}

/// Returns a plan of one fault in each of the first attempts of a job, at least one and at most
/// `restarts`. The same seed draws the same plan.
pub(super) fn random_plan(seed: u64, bounds: Bounds) -> FaultPlan {
    let mut draw = Draw(seed);
    let attempts = 1 + draw.below(bounds.restarts.max(1));
    let fault = |restart| {
        let rank = draw.below(bounds.ranks as u64) as usize;
        let (point, action) = draw.event(bounds);
        // Checkpoints are written by rank 0.
        let rank = if matches!(point, Point::Save(..)) {
            0
        } else {
            rank
        };
        Fault {
            rank,
            restart,
            point,
            action,
        }
    };
    FaultPlan {
        faults: (0..attempts).map(fault).collect(),
    }
}

/// SplitMix64 (Steele, Lea and Flood, 2014).
struct Draw(u64);

impl Draw {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Nearly uniform, which is enough here.
    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound.max(1)
    }

    fn event(&mut self, bounds: Bounds) -> (Point, Action) {
        if bounds.saves > 0 && self.below(3) == 0 {
            let stages = [
                SaveStage::Begin,
                SaveStage::Data,
                SaveStage::Written,
                SaveStage::Renamed,
            ];
            let stage = stages[self.below(4) as usize];
            let actions = [Action::Kill, Action::Exit(3), Action::Segv];
            let failures = [Action::DiskFull, Action::FailWrite];
            let action = if stage == SaveStage::Data && self.below(2) == 0 {
                failures[self.below(2) as usize]
            } else {
                actions[self.below(3) as usize]
            };
            // Checkpoints are numbered from 1.
            return (Point::Save(1 + self.below(bounds.saves), stage), action);
        }
        let point = match self.below(8) {
            0 => Point::Rendezvous,
            1 => Point::Connect,
            2 | 3 => Point::Operation(self.below(3 * bounds.steps)),
            _ => Point::Step(self.below(bounds.steps)),
        };
        let before = matches!(point, Point::Rendezvous | Point::Connect);
        let action = match self.below(if before { 6 } else { 8 }) {
            0 => Action::Kill,
            1 => Action::Segv,
            2 => Action::Exit(1 + self.below(100) as i32),
            3 => Action::Panic,
            4 => Action::Stop(None),
            5 => Action::Slow(Duration::from_millis(self.below(500))),
            6 => Action::DropConnection,
            _ => Action::CorruptFrame,
        };
        (point, action)
    }
}

#[test]
fn drawn_plans_survive_as_text() {
    for seed in 0..200 {
        let ranks = 1 + seed as usize % 8;
        let bounds = Bounds {
            ranks,
            steps: 50,
            saves: 5,
            restarts: 3,
        };
        let plan = random_plan(seed, bounds);
        assert!(!plan.faults.is_empty());
        assert!(
            plan.faults
                .iter()
                .all(|fault| fault.rank < ranks && fault.restart <= 3)
        );
        assert_eq!(plan.to_string().parse::<FaultPlan>(), Ok(plan));
    }
}
