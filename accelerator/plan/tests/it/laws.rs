//! Laws that hold for random plans.

use accelerator_plan::{
    BatchKind, BatchPlan, BatchSize, EpochPlan, Order, Permutation, PlanConfig, PlannedBatch,
    TailPolicy, TokenBatches,
};
use proptest::prelude::*;

#[derive(Clone, Debug)]
struct Settings {
    samples: u64,
    batch_size: usize,
    world_size: usize,
    order: Order,
    epoch: u64,
}

impl Settings {
    fn epoch(&self, tail: TailPolicy) -> EpochPlan {
        PlanConfig::new(self.samples, BatchSize::per_rank(self.batch_size).unwrap())
            .with_world_size(self.world_size)
            .with_tail(tail)
            .with_order(self.order)
            .init()
            .unwrap()
            .epoch(self.epoch)
    }

    /// Returns the samples in the order of the epoch, as a single rank would see them.
    fn sequence(&self) -> Vec<u64> {
        match self.order {
            Order::Sequential => (0..self.samples).collect(),
            Order::Shuffled { seed } => {
                let permutation = Permutation::new(self.samples, seed, self.epoch);
                (0..self.samples)
                    .map(|position| permutation.index(position))
                    .collect()
            }
        }
    }

    fn global_batch(&self) -> u64 {
        (self.batch_size * self.world_size) as u64
    }
}

/// Returns the samples of the first `steps` steps of all ranks.
fn real(plan: &BatchPlan, ranks: usize, steps: u64) -> Vec<u64> {
    let steps = 0..steps.min(plan.steps(0));
    steps
        .flat_map(|step| (0..ranks).filter_map(move |rank| plan.batch(rank, step)))
        .flat_map(|batch| batch.real_indices().to_vec())
        .collect()
}

fn settings() -> impl Strategy<Value = Settings> {
    let order = prop_oneof![
        Just(Order::Sequential),
        any::<u64>().prop_map(|seed| Order::Shuffled { seed })
    ];
    (0_u64..200, 1_usize..9, 1_usize..8, order, 0_u64..5).prop_map(
        |(samples, batch_size, world_size, order, epoch)| Settings {
            samples,
            batch_size,
            world_size,
            order,
            epoch,
        },
    )
}

/// Returns the batches of all ranks, step by step.
fn steps(epoch: &EpochPlan) -> Vec<Vec<PlannedBatch>> {
    let ranks = 0..epoch.plan().world_size();
    (0..epoch.steps(0))
        .map(|step| {
            ranks
                .clone()
                .filter_map(|rank| epoch.batch(rank, step))
                .collect()
        })
        .collect()
}

/// Returns the samples seen for the first time, in the order of steps and ranks.
fn first_seen(epoch: &EpochPlan) -> Vec<u64> {
    steps(epoch)
        .iter()
        .flatten()
        .flat_map(PlannedBatch::real_indices)
        .copied()
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn ranks_together_follow_the_sequence(settings in settings()) {
        for tail in [TailPolicy::Exact, TailPolicy::Pad, TailPolicy::Uneven] {
            prop_assert_eq!(first_seen(&settings.epoch(tail)), settings.sequence(), "{}", tail);
        }
        let kept = settings.samples - settings.samples % settings.global_batch();
        prop_assert_eq!(first_seen(&settings.epoch(TailPolicy::Drop)), &settings.sequence()[..kept as usize]);
    }

    #[test]
    fn batches_are_the_same_by_iterator_and_by_position(settings in settings()) {
        for tail in [TailPolicy::Exact, TailPolicy::Pad, TailPolicy::Drop, TailPolicy::Uneven] {
            let epoch = settings.epoch(tail);
            for rank in 0..settings.world_size {
                let walked: Vec<_> = epoch.rank(rank).collect();
                prop_assert_eq!(walked.len() as u64, epoch.steps(rank));
                prop_assert_eq!(epoch.rank(rank).size_hint(), (walked.len(), Some(walked.len())));
                for (step, batch) in walked.iter().enumerate() {
                    prop_assert_eq!(Some(batch.clone()), epoch.batch(rank, step as u64));
                    prop_assert_eq!(batch.step, step as u64);
                    prop_assert_eq!(batch.is_last, step + 1 == walked.len());
                    prop_assert!(!batch.indices.is_empty() && batch.indices.len() <= settings.batch_size);
                }
            }
        }
    }

    #[test]
    fn exact_is_even_in_steps_and_in_the_last_step(settings in settings()) {
        let epoch = settings.epoch(TailPolicy::Exact);
        prop_assert_eq!(epoch.steps(0), settings.samples.div_ceil(settings.global_batch()));
        for (step, batches) in steps(&epoch).iter().enumerate() {
            prop_assert_eq!(batches.len(), settings.world_size, "all ranks run every step");
            let sizes: Vec<_> = batches.iter().map(|batch| batch.real).collect();
            let (least, most) = (sizes.iter().min().unwrap(), sizes.iter().max().unwrap());
            prop_assert!(most - least <= 1, "{:?}", sizes);
            prop_assert!(sizes.is_sorted_by(|a, b| a >= b), "{:?}", sizes);
            prop_assert!(step as u64 + 1 == epoch.steps(0) || *least == settings.batch_size);
            for (rank, batch) in batches.iter().enumerate() {
                let is_idle = batch.kind == BatchKind::Idle;
                prop_assert_eq!(is_idle, batch.real == 0);
                prop_assert!(is_idle || batch.padding().is_empty());
                prop_assert!(rank > 0 || !is_idle, "rank 0 never idles");
            }
        }
    }

    #[test]
    fn exact_on_many_ranks_is_one_rank_with_the_global_batch(settings in settings()) {
        let alone = Settings { batch_size: settings.batch_size * settings.world_size, world_size: 1, ..settings.clone() };
        let together: Vec<Vec<u64>> = steps(&settings.epoch(TailPolicy::Exact))
            .iter()
            .map(|batches| batches.iter().flat_map(PlannedBatch::real_indices).copied().collect())
            .collect();
        let one: Vec<Vec<u64>> = alone.epoch(TailPolicy::Exact).rank(0).map(|batch| batch.indices).collect();
        prop_assert_eq!(together, one);
    }

    #[test]
    fn a_global_batch_that_does_not_divide_keeps_the_steps_of_one_rank(
        settings in settings(),
        global in 1_usize..40,
        consumed in any::<prop::sample::Index>(),
    ) {
        let consumed = consumed.index(settings.samples as usize + 1) as u64;
        let epoch = |world_size, tail| {
            let plan = PlanConfig::new(settings.samples, BatchSize::global(global).unwrap())
                .with_world_size(world_size)
                .with_order(settings.order)
                .with_tail(tail)
                .init();
            plan.map(|plan| plan.epoch(settings.epoch).starting_at(consumed).unwrap())
        };
        for tail in [TailPolicy::Exact, TailPolicy::Drop] {
            let many = match epoch(settings.world_size, tail) {
                Ok(many) => many,
                Err(error) => {
                    prop_assert!(error.is_batch_size() && global < settings.world_size, "{}", error);
                    continue;
                }
            };
            let alone = epoch(1, tail).unwrap();
            prop_assert_eq!(many.steps(0), alone.steps(0));
            for (step, batches) in steps(&many).iter().enumerate() {
                let together: Vec<_> = batches.iter().flat_map(PlannedBatch::real_indices).copied().collect();
                prop_assert_eq!(&together, &alone.batch(0, step as u64).unwrap().indices);
                prop_assert_eq!(many.consumed_after(step as u64), alone.consumed_after(step as u64));
                let sizes: Vec<_> = batches.iter().map(|batch| batch.real).collect();
                prop_assert!(sizes.is_sorted_by(|a, b| a >= b) && sizes[0] - sizes[sizes.len() - 1] <= 1, "{:?}", sizes);
                prop_assert!(sizes[0] <= many.plan().batch_size());
                prop_assert!(together.len() < global || sizes[sizes.len() - 1] > 0);
            }
        }
        for tail in [TailPolicy::Pad, TailPolicy::Uneven] {
            prop_assert_eq!(epoch(settings.world_size, tail).is_ok(), global % settings.world_size == 0);
        }
    }

    #[test]
    fn pad_fills_every_batch(settings in settings()) {
        let epoch = settings.epoch(TailPolicy::Pad);
        let sequence = settings.sequence();
        let mut repeated = Vec::new();
        for batches in steps(&epoch) {
            prop_assert_eq!(batches.len(), settings.world_size);
            for batch in batches {
                prop_assert_eq!(batch.indices.len(), settings.batch_size);
                prop_assert_eq!(batch.kind, BatchKind::Real);
                repeated.extend_from_slice(batch.padding());
            }
        }
        prop_assert!((repeated.len() as u64) < settings.global_batch());
        let expected: Vec<_> = sequence.iter().cycle().take(repeated.len()).copied().collect();
        prop_assert_eq!(repeated, expected, "padding starts the epoch again");
    }

    #[test]
    fn drop_and_uneven_have_no_padding(settings in settings()) {
        for tail in [TailPolicy::Drop, TailPolicy::Uneven] {
            let epoch = settings.epoch(tail);
            for (step, batches) in steps(&epoch).iter().enumerate() {
                for batch in batches {
                    prop_assert!(batch.padding().is_empty() && batch.kind == BatchKind::Real);
                    prop_assert!(tail == TailPolicy::Uneven || batch.real == settings.batch_size);
                }
                let is_full = batches.iter().all(|batch| batch.real == settings.batch_size);
                prop_assert!(step as u64 + 1 == epoch.steps(0) || is_full && batches.len() == settings.world_size);
            }
            let counts: Vec<_> = (0..settings.world_size).map(|rank| epoch.steps(rank)).collect();
            prop_assert!(counts.is_sorted_by(|a, b| a >= b && a - b <= 1), "{:?}", counts);
            prop_assert!(tail == TailPolicy::Uneven || counts[0] == *counts.last().unwrap());
        }
    }

    #[test]
    fn resuming_after_any_step_at_any_world_size_uses_the_rest_once(
        settings in settings(),
        step in any::<prop::sample::Index>(),
        batch_size in 1_usize..9,
        world_size in 1_usize..8,
    ) {
        let resumed = Settings { batch_size, world_size, ..settings.clone() };
        for tail in [TailPolicy::Exact, TailPolicy::Pad, TailPolicy::Uneven] {
            let before = settings.epoch(tail);
            let consumed = match before.steps(0) {
                0 => 0,
                steps => before.consumed_after(step.index(steps as usize) as u64),
            };
            let used: Vec<u64> = steps(&before)
                .iter()
                .take_while(|batches| before.consumed_after(batches[0].step) <= consumed)
                .flatten()
                .flat_map(PlannedBatch::real_indices)
                .copied()
                .collect();
            let rest = resumed.epoch(tail).starting_at(consumed).unwrap();
            let mut seen = used;
            seen.extend(first_seen(&rest));
            prop_assert_eq!(seen, settings.sequence(), "{}", tail);
            let left = settings.samples - consumed;
            prop_assert_eq!(rest.steps(0), left.div_ceil(resumed.global_batch()));
        }
    }

    #[test]
    fn resuming_at_the_same_world_size_changes_nothing(settings in settings(), skipped in 0_u64..40) {
        for tail in [TailPolicy::Pad, TailPolicy::Drop, TailPolicy::Uneven, TailPolicy::Exact] {
            let whole = settings.epoch(tail);
            if whole.steps(0) == 0 {
                continue;
            }
            let done = skipped % whole.steps(0);
            let rest = settings.epoch(tail).starting_at(whole.consumed_after(done)).unwrap();
            let expected: Vec<_> = steps(&whole).split_off(done as usize + 1);
            for (batches, expected) in steps(&rest).iter().zip(&expected) {
                for (batch, expected) in batches.iter().zip(expected) {
                    // An idle rank has no previous batch if it was idle from the start.
                    prop_assert!(batch.is_idle() && expected.is_idle() || batch.indices == expected.indices);
                    prop_assert_eq!(batch.real, expected.real);
                    prop_assert_eq!(batch.is_last, expected.is_last);
                }
                prop_assert_eq!(batches.len(), expected.len());
            }
            prop_assert_eq!(steps(&rest).len(), expected.len());
        }
    }

    #[test]
    fn huge_plans_are_reached_at_once(samples in 1_000_000_000_000_u64..1 << 62, seed in any::<u64>(), size in 1_usize..200, ranks in 1_usize..50) {
        let plan = PlanConfig::new(samples, BatchSize::per_rank(size).unwrap())
            .with_world_size(ranks)
            .with_order(Order::Shuffled { seed })
            .init()
            .unwrap();
        let epoch = plan.epoch(1);
        let last = epoch.steps(0) - 1;
        let real: u64 = (0..ranks).map(|rank| epoch.batch(rank, last).unwrap().real as u64).sum();
        prop_assert_eq!(last * plan.global_batch() + real, samples);
        prop_assert!(epoch.batch(ranks - 1, last / 2).unwrap().indices.iter().all(|&index| index < samples));
        prop_assert_eq!(epoch.consumed_after(u64::MAX), samples);
    }

    /// Ranks divide the batches of an epoch, and other ranks continue after some of the steps.
    #[test]
    fn batches_by_tokens_hold_each_sample_once_within_the_limit(
        lengths in prop::collection::vec(0_u64..60, 0..150),
        limit in 0_u64..400,
        seed in any::<u64>(),
        epoch in 0_u64..4,
        [before, after] in [1_usize..6, 1_usize..6],
        done in 0_u64..20,
    ) {
        let counted = |sample: &u64| lengths[*sample as usize].max(1);
        let padded = TokenBatches::padded(lengths.clone(), limit);
        let packed = TokenBatches::packed(lengths.clone(), limit);
        if (0..lengths.len() as u64).any(|sample| counted(&sample) > limit) {
            prop_assert!(padded.is_err() && packed.is_err());
            return Ok(());
        }
        let (padded, packed) = (padded.unwrap(), packed.unwrap());
        let half = lengths.len() / 2;
        let sliced = padded.slice(half..lengths.len());
        let alone = TokenBatches::padded(&lengths[half..], limit).unwrap();
        prop_assert_eq!(sliced.shuffled(seed, epoch), alone.shuffled(seed, epoch));
        for (batches, is_padded) in [(&padded, true), (&packed, false)] {
            prop_assert_eq!(batches.is_empty(), lengths.is_empty());
            for is_shuffled in [false, true] {
                let given = match is_shuffled {
                    true => batches.shuffled(seed, epoch),
                    false => batches.longest_first(),
                };
                prop_assert_eq!(given.len(), batches.len());
                for batch in &given {
                    let longest = batch.iter().map(counted).max().unwrap();
                    let tokens: u64 = batch.iter().map(counted).sum();
                    prop_assert!(tokens <= limit);
                    prop_assert!(!is_padded || longest * batch.len() as u64 <= limit);
                }
                let plan = BatchPlan::new(given.clone(), before, TailPolicy::Exact).unwrap();
                let mut seen = real(&plan, before, done);
                let rest = BatchPlan::new(given, after, TailPolicy::Exact).unwrap();
                let rest = rest.starting_at(seen.len() as u64).unwrap();
                seen.extend(real(&rest, after, u64::MAX));
                seen.sort_unstable();
                prop_assert_eq!(seen, (0..lengths.len() as u64).collect::<Vec<_>>());
            }
        }
        let tokens: u64 = (0..lengths.len() as u64).map(|sample| counted(&sample)).sum();
        prop_assert!(packed.len() as u64 >= tokens.div_ceil(limit));
        prop_assert!(packed.len() <= padded.len());
    }

    #[test]
    fn permutations_stay_inside_any_length(len in 1_u64.., seed in any::<u64>(), position in any::<u64>()) {
        prop_assert!(Permutation::new(len, seed, 0).index(position % len) < len);
    }
}
