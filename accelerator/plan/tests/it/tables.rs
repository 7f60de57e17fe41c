//! Written-out plans: the documented tables of the four tail policies.

use accelerator_plan::{
    BatchKind, BatchPlan, BatchSize, EpochPlan, PlanConfig, PlannedBatch, TailPolicy,
};

const TAILS: [TailPolicy; 4] = [
    TailPolicy::Exact,
    TailPolicy::Pad,
    TailPolicy::Drop,
    TailPolicy::Uneven,
];

fn epoch(samples: u64, batch_size: usize, world_size: usize, tail: TailPolicy) -> EpochPlan {
    PlanConfig::new(samples, BatchSize::per_rank(batch_size).unwrap())
        .with_world_size(world_size)
        .with_tail(tail)
        .init()
        .unwrap()
        .epoch(0)
}

/// Returns every rank's batches, written `0 1 2 | 6 7`, with repeated samples in parentheses and an idle rank's batch
/// in brackets.
fn table(epoch: &EpochPlan) -> Vec<String> {
    (0..epoch.plan().world_size())
        .map(|rank| epoch.rank(rank).map(cell).collect::<Vec<_>>().join(" | "))
        .collect()
}

fn cell(batch: PlannedBatch) -> String {
    let real = batch.real_indices().iter().map(u64::to_string);
    match batch.kind {
        BatchKind::Real => real
            .chain(batch.padding().iter().map(|index| format!("({index})")))
            .collect::<Vec<_>>()
            .join(" "),
        BatchKind::Idle => format!("{:?}", batch.indices),
    }
}

/// Returns the same for given batches.
fn dealt(plan: &BatchPlan, world_size: usize) -> Vec<String> {
    let row = |rank: usize| -> Vec<String> {
        let batches = (0..plan.steps(rank)).map(|step| plan.batch(rank, step).unwrap());
        batches.map(cell).collect()
    };
    (0..world_size).map(|rank| row(rank).join(" | ")).collect()
}

/// C1: the tables of batch samplers whose batches have different sizes.
#[test]
fn given_batches_go_round_as_in_accelerate() {
    let five = vec![
        vec![0, 1, 2],
        vec![3, 4],
        vec![5, 6, 7, 8],
        vec![9, 10, 11],
        vec![12, 13],
    ];
    let deal = |batches: &[Vec<u64>], ranks, tail| {
        dealt(
            &BatchPlan::new(batches.to_vec(), ranks, tail).unwrap(),
            ranks,
        )
    };
    let zero = "0 1 2 | 5 6 7 8 | 12 13";
    let pad = deal(&five, 2, TailPolicy::Pad);
    assert_eq!(pad, [zero, "3 4 | 9 10 11 | (0) (1) (2)"]);
    assert_eq!(deal(&five, 2, TailPolicy::Uneven), [zero, "3 4 | 9 10 11"]);
    let drop = deal(&five, 2, TailPolicy::Drop);
    assert_eq!(drop, ["0 1 2 | 5 6 7 8", "3 4 | 9 10 11"]);
    let exact = deal(&five, 2, TailPolicy::Exact);
    assert_eq!(exact, [zero, "3 4 | 9 10 11 | [9, 10, 11]"]);
    for tail in TAILS {
        assert_eq!(
            deal(&five[..4], 2, tail),
            ["0 1 2 | 5 6 7 8", "3 4 | 9 10 11"]
        );
        assert_eq!(deal(&[], 2, tail), ["", ""]);
    }
    let again = "(0) (1) (2)";
    assert_eq!(deal(&five[..1], 2, TailPolicy::Pad), ["0 1 2", again]);
    assert_eq!(
        deal(&five[..1], 3, TailPolicy::Pad),
        ["0 1 2", again, again]
    );
    let seven = [
        vec![0],
        vec![1, 2],
        vec![3, 4, 5],
        vec![6],
        vec![7, 8],
        vec![9, 10, 11],
        vec![12, 13],
    ];
    assert_eq!(
        deal(&seven, 3, TailPolicy::Pad),
        [
            "0 | 6 | 12 13",
            "1 2 | 7 8 | (0)",
            "3 4 5 | 9 10 11 | (1) (2)"
        ]
    );
}

#[test]
fn given_batches_go_on_where_one_ended() {
    let batches = vec![vec![0, 1, 2], vec![3, 4], vec![5, 6, 7, 8], vec![9]];
    let plan = BatchPlan::new(batches, 2, TailPolicy::Exact).unwrap();
    assert_eq!([0, 1, 2].map(|step| plan.consumed_after(step)), [5, 10, 10]);
    // Two batches were used in the first step, as by three ranks, and two ranks continue.
    let rest = plan.clone().starting_at(5).unwrap();
    assert_eq!(dealt(&rest, 2), ["5 6 7 8", "9"]);
    assert_eq!(dealt(&plan.clone().starting_at(10).unwrap(), 2), ["", ""]);
    assert!(plan.starting_at(6).unwrap_err().is_start());
    let error = BatchPlan::new(vec![vec![0], vec![]], 2, TailPolicy::Exact).unwrap_err();
    assert!(
        error.is_batch_size() && error.to_string().contains("batch 1"),
        "{error}"
    );
    assert!(
        BatchPlan::new(vec![], 0, TailPolicy::Exact)
            .unwrap_err()
            .is_world_size()
    );
}

#[test]
fn a_list_of_samples_is_dealt_as_an_epoch_of_its_own() {
    let plan = PlanConfig::new(100, BatchSize::per_rank(2).unwrap()).with_world_size(2);
    let rows = |tail| {
        let plan = plan.clone().with_tail(tail).init().unwrap();
        table(&plan.listed(3, [9, 9, 7, 5, 0]).unwrap())
    };
    assert_eq!(rows(TailPolicy::Exact), ["9 9 | 0", "7 5 | [7, 5]"]);
    assert_eq!(rows(TailPolicy::Pad), ["9 9 | 0 (9)", "7 5 | (9) (7)"]);
    let plan = plan.init().unwrap();
    let listed = plan.listed(3, [9, 9, 7, 5, 0]).unwrap();
    let rest = listed.clone().starting_at(1).unwrap();
    assert_eq!(table(&rest), ["9 7", "5 0"]);
    assert!(listed.starting_at(6).unwrap_err().is_start());
}

/// The rows are those of the ranks, with ` / ` between.
#[test]
fn each_tail_policy_shares_the_last_batch_out_in_its_way() {
    use TailPolicy::{Drop, Exact, Pad, Uneven};
    for (tail, samples, size, ranks, start, expected) in [
        (Exact, 12, 3, 2, 0, "0 1 2 | 6 7 8 / 3 4 5 | 9 10 11"),
        (Exact, 11, 3, 2, 0, "0 1 2 | 6 7 8 / 3 4 5 | 9 10"),
        (Exact, 9, 3, 2, 0, "0 1 2 | 6 7 / 3 4 5 | 8"),
        (Exact, 8, 3, 2, 0, "0 1 2 | 6 / 3 4 5 | 7"),
        (Exact, 2, 3, 2, 0, "0 / 1"),
        (Exact, 11, 4, 3, 0, "0 1 2 3 / 4 5 6 7 / 8 9 10"),
        (Exact, 10, 4, 3, 0, "0 1 2 3 / 4 5 6 / 7 8 9"),
        // An idle rank repeats its previous batch, or rank 0's if it has none.
        (Exact, 7, 3, 2, 0, "0 1 2 | 6 / 3 4 5 | [3, 4, 5]"),
        (Exact, 8, 2, 3, 0, "0 1 | 6 / 2 3 | 7 / 4 5 | [4, 5]"),
        (Exact, 2, 4, 4, 0, "0 / 1 / [0] / [0]"),
        (Exact, 8, 2, 3, 7, "7 / [7] / [7]"),
        (Pad, 9, 3, 2, 0, "0 1 2 | 6 7 8 / 3 4 5 | (0) (1) (2)"),
        (Pad, 8, 3, 2, 0, "0 1 2 | 6 7 (0) / 3 4 5 | (1) (2) (3)"),
        (Pad, 2, 3, 2, 0, "0 1 (0) / (1) (0) (1)"),
        (Pad, 1, 4, 2, 0, "0 (0) (0) (0) / (0) (0) (0) (0)"),
        (Pad, 5, 2, 4, 0, "0 1 / 2 3 / 4 (0) / (1) (2)"),
        // After a resume, the padding still comes from the start of the whole epoch.
        (Pad, 8, 3, 2, 6, "6 7 (0) / (1) (2) (3)"),
        (Pad, 8, 3, 2, 7, "7 (0) (1) / (2) (3) (4)"),
        (Drop, 11, 3, 2, 0, "0 1 2 / 3 4 5"),
        (Drop, 12, 3, 2, 0, "0 1 2 | 6 7 8 / 3 4 5 | 9 10 11"),
        (Drop, 5, 3, 2, 0, " / "),
        (Uneven, 10, 3, 2, 0, "0 1 2 | 6 7 8 / 3 4 5 | 9"),
        (Uneven, 8, 3, 2, 0, "0 1 2 | 6 7 / 3 4 5"),
        (Uneven, 1, 3, 2, 0, "0 / "),
    ] {
        let epoch = epoch(samples, size, ranks, tail)
            .starting_at(start)
            .unwrap();
        assert_eq!(table(&epoch).join(" / "), expected, "{tail} of {samples}");
    }
    let epoch = epoch(11, 3, 2, Drop);
    assert_eq!((epoch.consumed_after(0), epoch.consumed_after(9)), (6, 6));
}

#[test]
fn an_empty_epoch_has_no_steps() {
    for tail in TAILS {
        for epoch in [
            epoch(0, 4, 3, tail),
            epoch(7, 4, 3, tail).starting_at(7).unwrap(),
        ] {
            assert_eq!(table(&epoch), ["", "", ""]);
            assert_eq!(epoch.steps(0), 0);
            assert_eq!(epoch.batch(0, 0), None);
            assert_eq!(epoch.consumed_after(0), epoch.start());
        }
    }
}

#[test]
fn steps_and_offsets_are_told() {
    let epoch = epoch(10, 2, 2, TailPolicy::Exact);
    assert_eq!(
        (0..4)
            .map(|step| epoch.consumed_after(step))
            .collect::<Vec<_>>(),
        [4, 8, 10, 10]
    );
    assert_eq!(
        epoch.rank(1).map(|batch| batch.step).collect::<Vec<_>>(),
        [0, 1, 2]
    );
    assert_eq!(
        epoch.rank(1).map(|batch| batch.is_last).collect::<Vec<_>>(),
        [false, false, true]
    );
    assert_eq!(
        (epoch.epoch(), epoch.start(), epoch.plan().samples()),
        (0, 0, 10)
    );
    // A rank outside the world has nothing, rather than another rank's samples.
    assert_eq!(
        (epoch.steps(2), epoch.batch(2, 0), epoch.rank(2).next()),
        (0, None, None)
    );
    let error = epoch.starting_at(11).unwrap_err();
    let message = error.to_string();
    assert!(
        error.is_start() && message.contains("after 11 samples, it has only 10: give at most 10"),
        "{message}"
    );
}

#[test]
fn iterators_skip_without_walking() {
    let epoch = epoch(1 << 60, 1, 2, TailPolicy::Exact);
    let mut batches = epoch.rank(1);
    assert_eq!(batches.size_hint().0 as u64, 1 << 59);
    assert_eq!(batches.nth((1 << 59) - 2).unwrap().indices, [(1 << 60) - 3]);
    let last = batches.next().unwrap();
    assert!(last.is_last && last.indices == [(1 << 60) - 1]);
    assert_eq!((batches.size_hint(), batches.next()), ((0, Some(0)), None));
    assert_eq!(epoch.rank(0).nth(usize::MAX), None);
}

#[test]
fn a_global_batch_that_does_not_divide_gives_the_first_ranks_more() {
    let global = |samples, size, ranks, tail| {
        let plan = PlanConfig::new(samples, BatchSize::global(size).unwrap())
            .with_world_size(ranks)
            .with_tail(tail)
            .init()
            .unwrap();
        assert_eq!(plan.batch_size(), size.div_ceil(ranks));
        table(&plan.epoch(0))
    };
    assert_eq!(
        global(14, 5, 3, TailPolicy::Exact),
        ["0 1 | 5 6 | 10 11", "2 3 | 7 8 | 12", "4 | 9 | 13"]
    );
    assert_eq!(
        global(11, 5, 3, TailPolicy::Exact),
        ["0 1 | 5 6 | 10", "2 3 | 7 8 | [7, 8]", "4 | 9 | [9]"]
    );
    assert_eq!(
        global(14, 5, 2, TailPolicy::Drop),
        ["0 1 2 | 5 6 7", "3 4 | 8 9"]
    );
}
