use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use accelerator_collective::{Buffer, DType, ProcessGroup};
use burn::module::ParamId;
use proptest::prelude::*;

use super::matrix::{MatrixFloat, StepRng};
use super::*;
use crate::model::{Float, Trainable};
use crate::reduce::hook::BucketParameter;
use crate::reduce::on_ranks;

/// A hook with a bucket of its own.
struct Bench {
    group: ProcessGroup,
    hook: PowerSgd,
    parameters: Vec<Trainable>,
    /// The number of a parameter without a gradient.
    absent: Option<usize>,
    step: u64,
}

impl Bench {
    fn new(group: &ProcessGroup, hook: PowerSgd, shapes: &[&[usize]]) -> Self {
        let parameters = shapes.iter().enumerate();
        let parameters = parameters.map(|(number, shape)| Trainable {
            id: ParamId::from(number as u64),
            path: format!("layer.{number}"),
            shape: shape.to_vec(),
            float: Float::F32,
            piece: None,
        });
        Self {
            group: group.clone(),
            hook,
            parameters: parameters.collect(),
            absent: None,
            step: 0,
        }
    }

    /// Returns the result of one step on this rank's values.
    fn reduce<T: MatrixFloat>(&mut self, values: &[T]) -> Vec<T> {
        let mut buffer: Buffer = self.group.buffer(T::DTYPE, values.len());
        buffer.as_mut_slice().unwrap().copy_from_slice(values);
        let mut start = 0;
        let parameters = self.parameters.iter().enumerate();
        let parameters = parameters.map(|(number, parameter)| {
            let end = start + parameter.shape.iter().product::<usize>();
            let range = core::mem::replace(&mut start, end)..end;
            BucketParameter::new(parameter, range, self.absent != Some(number))
        });
        let parameters = parameters.collect();
        let mut bucket = GradientBucket::new(&mut buffer, 0, 1, self.step, parameters);
        let ranks = Ranks::new(&self.group);
        self.hook.reduce(&mut bucket, &ranks).unwrap();
        self.step += 1;
        buffer.as_slice().unwrap().to_vec()
    }
}

/// Returns the values of a rank in a step.
fn values_of<T: MatrixFloat>(count: usize, seed: u64, rank: usize, step: u64) -> Vec<T> {
    let mut draws = StepRng::new(seed, &format!("rank {rank}"), step);
    (0..count).map(|_| T::narrowed(draws.next())).collect()
}

fn every(hook: PowerSgd) -> PowerSgd {
    hook.start_after(0).min_compression(0.0)
}

const SHAPES: [&[usize]; 5] = [&[7, 5], &[6], &[5, 9], &[3, 2, 4], &[]];
const COUNT: usize = 35 + 6 + 45 + 24 + 1;

fn largest_difference<T: MatrixFloat>(left: &[T], right: &[T]) -> f64 {
    let pairs = left.iter().zip(right);
    let differences = pairs.map(|(left, right)| (left.widened() - right.widened()).abs());
    differences.fold(0.0, f64::max)
}

fn full_rank<T: MatrixFloat>(bound: f64) {
    let outcomes = on_ranks(3, |group| {
        let mut bench = Bench::new(&group, every(PowerSgd::new(100)), &SHAPES);
        let mut all = Vec::new();
        for step in 0..4 {
            let mine = |rank| values_of::<T>(COUNT, 5, rank, step);
            let found = bench.reduce(&mine(group.rank()));
            let mut exact = vec![T::default(); COUNT];
            for rank in 0..3 {
                for (sum, value) in exact.iter_mut().zip(mine(rank)) {
                    *sum += value;
                }
            }
            let off = largest_difference(&found, &exact);
            assert!(off < bound, "{off} in step {step}");
            all.extend(found.iter().map(|value| value.widened().to_bits()));
        }
        all
    });
    assert!(outcomes.iter().all(|bits| *bits == outcomes[0]));
}

#[test]
fn with_full_rank_the_sum_is_exact_to_rounding() {
    full_rank::<f32>(1e-5);
    full_rank::<f64>(1e-13);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn what_was_sent_and_the_errors_add_up_to_the_gradients(
        seed: u64, ranks in 1_usize..4, rank in 1_usize..4, steps in 1_u64..9, is_warm: bool,
    ) {
        let outcomes = on_ranks(ranks, |group| {
            let hook = every(PowerSgd::new(rank)).seed(seed);
            let hook = if is_warm { hook } else { hook.without_warm_start() };
            let mut bench = Bench::new(&group, hook, &SHAPES);
            let (mut sent, mut mine) = (vec![0.0; COUNT], vec![0.0; COUNT]);
            for step in 0..steps {
                let values = values_of::<f64>(COUNT, seed, group.rank(), step);
                for (sum, value) in mine.iter_mut().zip(&values) {
                    *sum += value;
                }
                for (sum, value) in sent.iter_mut().zip(bench.reduce(&values)) {
                    *sum += value;
                }
            }
            // The errors are at the places of the parameters.
            let mut left = vec![0.0; COUNT];
            let mut start = 0;
            for parameter in &bench.parameters {
                let end = start + parameter.shape.iter().product::<usize>();
                if let Some(tensor) = bench.hook.double.tensors.get(&parameter.path) {
                    left[start..end].copy_from_slice(&tensor.error);
                }
                start = end;
            }
            (sent, mine, left)
        });
        for at in 0..COUNT {
            let sent = outcomes[0].0[at];
            let left: f64 = outcomes.iter().map(|(_, _, left)| left[at]).sum();
            let wanted: f64 = outcomes.iter().map(|(_, mine, _)| mine[at]).sum();
            prop_assert!((sent + left - wanted).abs() < 1e-11, "{sent} + {left}, not {wanted}");
            for outcome in &outcomes {
                prop_assert_eq!(outcome.0[at].to_bits(), sent.to_bits());
            }
        }
        // The result is an approximation.
        prop_assert!(outcomes[0].2.iter().any(|left| left.abs() > 1e-3));
    }
}

#[test]
fn a_gradient_of_that_rank_is_sent_whole() {
    // The gradient is the sum of two outer products.
    let (rows, columns) = (12, 20);
    let values: Vec<f64> = (0..rows * columns)
        .map(|at| {
            let (row, column) = ((at / columns) as f64, (at % columns) as f64);
            (row * 0.7).sin() * (column * 1.3).cos() + 0.01 * (row * 1.9).cos() * column
        })
        .collect();
    let group = ProcessGroup::single();
    for (rank, is_whole) in [(1, false), (2, true), (3, true)] {
        let mut bench = Bench::new(&group, every(PowerSgd::new(rank)), &[&[rows, columns]]);
        // A third column finds nothing, and is drawn anew in each step.
        for _ in 0..3 {
            let off = largest_difference(&bench.reduce(&values), &values);
            assert_eq!(off < 1e-12, is_whole, "rank {rank}: {off}");
            bench.hook.double.tensors.clear();
        }
    }
}

#[test]
fn a_warm_start_finds_the_largest_direction() {
    let (rows, columns) = (30, 30);
    let values = values_of::<f64>(rows * columns, 3, 0, 0);
    let group = ProcessGroup::single();
    let error_after = |hook: PowerSgd| {
        let hook = every(hook).without_error_feedback();
        let mut bench = Bench::new(&group, hook, &[&[rows, columns]]);
        let mut found = Vec::new();
        for _ in 0..60 {
            found = bench.reduce(&values);
        }
        let pairs = found.iter().zip(&values);
        pairs
            .map(|(found, value)| (found - value).powi(2))
            .sum::<f64>()
    };
    let (warm, cold) = (
        error_after(PowerSgd::new(1)),
        error_after(PowerSgd::new(1).without_warm_start()),
    );
    assert!(warm < 0.97 * cold, "{warm} {cold}");
}

#[test]
fn a_product_beyond_the_range_is_sent_as_it_is() {
    let (rows, columns) = (40, 50);
    for odd_step in [0, 2] {
        let outcomes = on_ranks(2, |group| {
            let mut bench = Bench::new(&group, every(PowerSgd::new(1)), &[&[rows, columns]]);
            let (mut sum, mut sent) = (0.0, 0.0);
            for step in 0..4 {
                let mut values = values_of::<f32>(rows * columns, 1, group.rank(), step);
                if step == odd_step {
                    values.iter_mut().for_each(|value| *value = 1e38);
                    let found = bench.reduce(&values);
                    assert!(found.iter().all(|value| *value == 2e38), "{found:?}");
                    (sum, sent) = (0.0, 0.0);
                    continue;
                }
                sum += values[7];
                let found = bench.reduce(&values);
                assert!(found.iter().all(|value| value.abs() < 10.0));
                sent += found[7];
            }
            (sum, sent, bench.hook.single.tensors["layer.0"].error[7])
        });
        // Nothing is left of the odd step or of those before it.
        let sum: f32 = outcomes.iter().map(|(sum, _, error)| sum - error).sum();
        assert!((sum - outcomes[0].1).abs() < 1e-4, "{outcomes:?}");
    }
}

#[test]
fn a_parameter_without_a_gradient_keeps_its_error() {
    let group = ProcessGroup::single();
    let mut bench = Bench::new(&group, every(PowerSgd::new(1)), &[&[8, 8], &[4, 6]]);
    bench.reduce(&values_of::<f64>(88, 1, 0, 0));
    let error = bench.hook.double.tensors["layer.1"].error.clone();
    assert!(error.iter().any(|value| *value != 0.0));
    bench.absent = Some(1);
    let mut values = values_of::<f64>(88, 1, 0, 1);
    values[64..].fill(0.0);
    bench.reduce(&values);
    assert_eq!(bench.hook.double.tensors["layer.1"].error, error);
}

#[test]
fn few_values_travel_in_two_operations() {
    // Compressing the other layers does not pay.
    let shapes: [&[usize]; 3] = [&[100, 200], &[200], &[4, 4]];
    let count = 20_000 + 200 + 16;
    for (rank, start_after) in [(1, 0), (4, 0), (1, 2)] {
        on_ranks(2, |group| {
            let (bytes, calls) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
            let (sum, number) = (bytes.clone(), calls.clone());
            group
                .observe(move |operation| {
                    sum.fetch_add(operation.bytes, Ordering::Relaxed);
                    number.fetch_add(1, Ordering::Relaxed);
                })
                .unwrap();
            let hook = PowerSgd::new(rank).start_after(start_after);
            let mut bench = Bench::new(&group, hook, &shapes);
            for step in 0..4 {
                let values = values_of::<f32>(count, 2, group.rank(), step);
                let found = bench.reduce(&values);
                let taken = (
                    bytes.swap(0, Ordering::Relaxed) / DType::F32.size(),
                    calls.swap(0, Ordering::Relaxed),
                );
                if step < start_after {
                    assert_eq!(taken, (count, 1));
                } else {
                    assert_eq!(taken, (216 + rank * 300, 2));
                }
                // These layers are exact.
                let other = values_of::<f32>(count, 2, 1 - group.rank(), step);
                for at in 20_000..count {
                    assert_eq!(found[at], values[at] + other[at]);
                }
            }
        });
    }
}

#[test]
fn a_hook_continues_from_what_was_saved() {
    let run = |from: u64, saved: Vec<Option<Vec<u8>>>, saved_by: SavedBy| {
        on_ranks(2, |group| {
            let mut bench = Bench::new(&group, every(PowerSgd::new(2)), &SHAPES);
            bench.step = from;
            if let Some(state) = &saved[group.rank()] {
                bench.hook.restore(state, saved_by).unwrap();
            }
            let mut states = Vec::new();
            let mut found = Vec::new();
            for step in from..6 {
                states.push(bench.hook.save().unwrap());
                found = bench.reduce(&values_of::<f64>(COUNT, 9, group.rank(), step));
            }
            (found, states)
        })
    };
    let whole = run(0, vec![None, None], SavedBy::ThisRank);
    assert!(whole[0].1[0].is_empty(), "nothing is kept before a step");
    let state = |rank: usize, step: usize| Some(whole[rank].1[step].clone());
    for step in 1..6 {
        let own = vec![state(0, step), state(1, step)];
        let resumed = run(step as u64, own, SavedBy::ThisRank);
        assert_eq!(resumed[0].0, whole[0].0, "from step {step}");
        // The errors of rank 0 would count twice.
        let one = vec![state(0, step), state(0, step)];
        let resumed = run(step as u64, one.clone(), SavedBy::OneForAll);
        assert_ne!(resumed[0].0, whole[0].0);
        let mut hook = PowerSgd::new(2);
        let saved = one[0].as_deref().unwrap();
        hook.restore(saved, SavedBy::OneForAll).unwrap();
        let tensors = || hook.double.tensors.values();
        assert!(tensors().all(|tensor| tensor.error.is_empty()));
        assert!(tensors().any(|tensor| tensor.q[0] != 0.0));
    }
    let mut hook = PowerSgd::new(2);
    assert!(hook.restore(b"no such file", SavedBy::ThisRank).is_err());
}

#[test]
fn names_tell_hooks_apart() {
    let hooks = [
        PowerSgd::new(1),
        PowerSgd::new(2),
        PowerSgd::new(1).start_after(10),
        PowerSgd::new(1).min_compression(1.5),
        PowerSgd::new(1).seed(1),
        PowerSgd::new(1).without_error_feedback(),
        PowerSgd::new(1).without_warm_start(),
    ];
    let names: std::collections::HashSet<_> = hooks.iter().map(CommunicationHook::name).collect();
    assert_eq!(names.len(), hooks.len());
    assert_eq!(PowerSgd::new(0).name(), PowerSgd::new(1).name());
}
