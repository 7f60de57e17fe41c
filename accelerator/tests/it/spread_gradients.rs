//! Ranks of a sharded optimizer get the sums that they step, and nothing else changes.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crate::common::{devices, flat, known};
use accelerator::optim::{InitFused, Manual, Sharded};
use accelerator::prelude::*;
use accelerator::{AcceleratorBuilder, AveragedGradients, Clip, Compression};
use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, LambConfig, ModuleOptimizer, SgdConfig};
use burn::tensor::activation::tanh;
use burn::tensor::{Device, Tensor, TensorData};

/// A net whose `wide` is cut among up to four ranks. `late` takes part from the fourth step on, and the others belong
/// to one rank each.
#[derive(Debug, Module)]
struct Net {
    first: Linear,
    wide: Linear,
    late: Linear,
    last: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(device);
        known(Self {
            first: linear(2, 60),
            wide: linear(60, 300),
            late: linear(60, 70),
            last: linear(300, 1),
        })
    }

    fn loss(&self, place: Place, device: &Device) -> Tensor<1> {
        let count = 2 * place.rows();
        let seed = (place.rank * 31 + place.step * 7) as f32;
        let input = (0..count).map(|at| (at as f32 * 0.37 + seed).sin());
        let input = TensorData::new(input.collect::<Vec<_>>(), [place.rows(), 2]);
        let x = tanh(self.first.forward(Tensor::<2>::from_data(input, device)));
        let y = self.last.forward(tanh(self.wide.forward(x.clone())));
        let loss = (y - 1.0).powi_scalar(2).mean();
        match place.step {
            ..3 => loss,
            _ => loss + self.late.forward(x).powi_scalar(2).mean(),
        }
    }
}

#[derive(Clone, Copy)]
struct Place {
    rank: usize,
    step: usize,
}

impl Place {
    /// Returns the number of rows, which differs between ranks.
    fn rows(self) -> usize {
        3 + self.rank
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum State {
    Sharded,
    Whole,
}

const BOTH: [State; 2] = [State::Whole, State::Sharded];

fn adamw() -> ModuleOptimizer {
    AdamWConfig::new().with_weight_decay(0.05).init()
}

fn optimizer(
    accelerator: &Accelerator,
    state: State,
    optimizer: ModuleOptimizer,
) -> accelerator::Result<PreparedOptimizer<Manual>> {
    match state {
        State::Whole => accelerator.prepare(optimizer),
        State::Sharded => accelerator.prepare(Sharded(optimizer)),
    }
}

/// Prepares a net and its optimizer.
fn prepared(
    accelerator: &Accelerator,
    state: State,
) -> accelerator::Result<(Net, PreparedOptimizer<Manual>)> {
    let model = accelerator.prepare(Net::new(&accelerator.device()))?;
    Ok((model, optimizer(accelerator, state, adamw())?))
}

/// Returns the gradients of this rank's samples of a step.
fn backward(
    accelerator: &Accelerator,
    model: &Net,
    step: usize,
) -> accelerator::Result<AveragedGradients> {
    let rank = accelerator.rank();
    let place = Place { rank, step };
    let loss = model.loss(place, &accelerator.device());
    accelerator.backward(loss, model, place.rows())
}

/// The figures of `look` and the model of a rank after each of six steps.
type Told = Vec<(Vec<u64>, Vec<f32>)>;

type Look = fn(AveragedGradients) -> (AveragedGradients, Vec<Option<f64>>);

fn trained(builder: AcceleratorBuilder, ranks: usize, state: State, look: Look) -> Vec<Told> {
    let builder = builder.bucket_size(30_000);
    let outcome = builder.launch(ranks, |accelerator| {
        let (mut model, mut optimizer) = prepared(&accelerator, state)?;
        let mut told = Vec::new();
        for step in 0..6 {
            let gradients = backward(&accelerator, &model, step)?;
            let (gradients, figures) = look(gradients);
            let figures = figures.into_iter().map(|figure| figure.unwrap().to_bits());
            model = optimizer.step(0.02, model, gradients);
            assert!(matches!(optimizer.outcome(), StepOutcome::Stepped { .. }));
            told.push((figures.collect(), flat(&model)));
        }
        Ok(told)
    });
    outcome.unwrap()
}

fn check(name: &str, builder: impl Fn() -> AcceleratorBuilder, look: Look) {
    for ranks in [2, 3] {
        let [whole, sharded] = BOTH.map(|state| trained(builder(), ranks, state, look));
        assert_ne!(
            whole[0].first(),
            whole[0].last(),
            "{name}: nothing was learnt"
        );
        for told in whole.iter().chain(&sharded) {
            assert!(*told == whole[0], "{name}, {ranks} ranks");
        }
    }
}

#[test]
fn norms_and_clips_have_the_bits_of_whole_gradients() {
    let cases: [(&str, Look); 6] = [
        ("norms", |mut gradients| {
            let figures = vec![
                gradients.norm(),
                gradients.norm_of_order(1.0),
                gradients.norm_of_order(2.0),
                gradients.norm_of_order(2.5),
                gradients.norm_of_order(f64::INFINITY),
            ];
            (gradients, figures)
        }),
        ("clipped by norm", |gradients| {
            let mut gradients = gradients.clip_norm(0.1);
            let figures = vec![gradients.norm(), gradients.norm_of_order(2.0)];
            (gradients, figures)
        }),
        ("clipped by value", |gradients| {
            let mut gradients = gradients.clip_value(1e-3);
            let figures = vec![gradients.norm(), gradients.norm_of_order(2.0)];
            (gradients, figures)
        }),
        ("clipped by groups", |gradients| {
            let wide = Clip::norm(0.01).of_order(f64::INFINITY);
            let gradients = gradients.clip(wide.only(|path| path.starts_with("wide")));
            let rest = Clip::norm(0.02).of_order(3.0);
            let mut gradients = gradients.clip(rest.only(|path| !path.starts_with("wide")));
            let figures = vec![gradients.norm_of_order(f64::INFINITY)];
            (gradients, figures)
        }),
        ("clipped twice", |gradients| {
            let gradients = gradients.clip_norm(0.1).clip_value(1e-3);
            let mut gradients = gradients.clip_norm(0.05);
            let figures = vec![gradients.norm(), gradients.norm_of_order(2.0)];
            (gradients, figures)
        }),
        ("not looked at", |gradients| (gradients, Vec::new())),
    ];
    for kind in devices() {
        for (name, look) in cases {
            check(name, || Accelerator::builder().device(kind), look);
        }
    }
}

#[test]
fn compressed_gradients_have_the_bits_of_whole_ones_also_beyond_their_range() {
    for compression in [Compression::F16, Compression::Bf16] {
        let builder = || Accelerator::builder().compression(compression);
        check(&compression.to_string(), builder, |gradients| {
            let mut gradients = gradients.clip_norm(0.1);
            let figures = vec![gradients.norm()];
            (gradients, figures)
        });
    }
    // The gradient of one parameter, which one rank steps, is too large for f16.
    let [whole, sharded] = BOTH.map(|state| {
        let builder = Accelerator::builder().compression(Compression::F16);
        let outcome = builder.launch(2, |accelerator| {
            let (mut model, mut optimizer) = prepared(&accelerator, state)?;
            for step in 0..4 {
                let rank = accelerator.rank();
                let place = Place { rank, step };
                let huge = model.last.bias.as_ref().unwrap().val().sum() * 1e6;
                let loss = model.loss(place, &accelerator.device()) + huge;
                let gradients = accelerator.backward(loss, &model, place.rows())?;
                model = optimizer.step(0.02, model, gradients);
            }
            Ok(flat(&model))
        });
        outcome.unwrap()
    });
    assert_eq!(sharded, whole);
}

/// Returns a function that gives the names of a rank's operations since its last call.
fn operations(accelerator: &Accelerator) -> impl Fn() -> Vec<&'static str> + use<> {
    let names = Arc::new(Mutex::new(Vec::new()));
    let seen = names.clone();
    let observed = accelerator.group().observe(move |operation| {
        seen.lock().unwrap().push(operation.name);
    });
    observed.unwrap();
    move || core::mem::take(&mut *names.lock().unwrap())
}

#[test]
fn from_the_second_window_on_sums_go_to_those_who_step_them() {
    let of_ranks = Accelerator::builder()
        .overlap(Overlap::Off)
        .launch(2, |accelerator| {
            let (mut model, mut optimizer) = prepared(&accelerator, State::Sharded)?;
            let operations = operations(&accelerator);
            let mut told = Vec::new();
            for step in 0..4 {
                operations();
                let mut gradients = backward(&accelerator, &model, step)?;
                let names = operations();
                let norm = match (accelerator.rank(), step) {
                    // No other rank asks for the norm.
                    (1, 1..) => Some(gradients.norm()),
                    _ => None,
                };
                assert_eq!(operations(), [""; 0], "a norm takes no operation");
                model = optimizer.step(0.02, model, gradients);
                told.push((names, norm));
            }
            Ok(told)
        })
        .unwrap();
    let buckets = 1;
    for (rank, told) in of_ranks.iter().enumerate() {
        for (step, (names, norm)) in told.iter().enumerate() {
            let of = |wanted: &str| names.iter().filter(|name| **name == wanted).count();
            let (scattered, reduced) = match step {
                // Buckets and the control vector.
                0 => (0, buckets + 1),
                1 => (buckets, 1),
                // The norm was requested before this window was reduced.
                _ => (buckets, 2),
            };
            let found = (of("reduce_scatter_buffer"), of("all_reduce"));
            assert_eq!(found, (scattered, reduced), "step {step}: {names:?}");
            let known = norm.map(|norm| norm.is_some());
            let expected = match (rank, step) {
                (1, 1) => Some(false),
                (1, 2..) => Some(true),
                _ => None,
            };
            assert_eq!(known, expected, "rank {rank}, step {step}");
        }
    }
}

#[test]
fn who_needs_all_sums_gets_them() {
    // Each letter is the optimizer that steps then.
    for order in ["SSWWSSTTSW", "SWSWSWST", "STSTWTSS"] {
        let [whole, mixed] = BOTH.map(|state| {
            let outcome = accelerator::launch(2, |accelerator| {
                let device = accelerator.device();
                let mut model = accelerator.prepare(Net::new(&device))?;
                let mut first = optimizer(&accelerator, state, adamw())?;
                // Its parameters cannot be cut, so they are on other ranks.
                let mut second = optimizer(&accelerator, state, LambConfig::new().init())?;
                let mut plain = accelerator.prepare(SgdConfig::new().init_fused())?;
                for (step, by) in order.chars().enumerate() {
                    let gradients = backward(&accelerator, &model, step)?;
                    let gradients = gradients.clip_norm(0.1);
                    model = match by {
                        'S' => first.step(0.02, model, gradients),
                        'T' => second.step(0.02, model, gradients),
                        _ => plain.step(0.02, model, gradients),
                    };
                }
                Ok(flat(&model))
            });
            outcome.unwrap()
        });
        assert_eq!(mixed, whole, "{order}");
    }
}

#[test]
fn burns_gradients_are_whole() {
    struct Reader<'a>(&'a burn::optim::GradientsParams, Vec<f32>);
    impl ModuleVisitor for Reader<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if let Some(gradient) = self.0.get::<D>(param.id) {
                self.1.extend(gradient.into_data().iter::<f32>());
            }
        }
    }
    let [whole, sharded] = BOTH.map(|state| {
        let outcome = accelerator::launch(2, |accelerator| {
            let (mut model, mut optimizer) = prepared(&accelerator, state)?;
            let mut read = Vec::new();
            for step in 0..4 {
                let gradients = backward(&accelerator, &model, step)?;
                if step == 2 {
                    let gradients = gradients.clip_value(1e-3).into_params().unwrap();
                    let mut reader = Reader(&gradients, Vec::new());
                    model.visit(&mut reader);
                    read = reader.1;
                } else {
                    model = optimizer.step(0.02, model, gradients);
                }
            }
            Ok((read, flat(&model)))
        });
        outcome.unwrap()
    });
    assert!(whole[0].0.len() > 60 * 300);
    assert!(sharded == whole);
}

#[test]
fn what_is_not_finite_on_one_rank_is_seen_by_all() {
    let norms = accelerator::launch(3, |accelerator| {
        let (mut model, mut optimizer) = prepared(&accelerator, State::Sharded)?;
        for step in 0..2 {
            let rank = accelerator.rank();
            let place = Place { rank, step };
            let bias = model.last.bias.as_ref().unwrap().val().sum();
            let odd = if step == 1 && rank == 2 {
                f32::NAN
            } else {
                0.0
            };
            let loss = model.loss(place, &accelerator.device()) + bias * odd;
            let gradients = accelerator.backward(loss, &model, place.rows())?;
            if step == 1 {
                let mut gradients = gradients.clip_norm(1.0);
                let largest = gradients.norm_of_order(f64::INFINITY);
                return Ok([gradients.norm(), largest].map(|norm| norm.is_some_and(f64::is_nan)));
            }
            model = optimizer.step(0.02, model, gradients);
        }
        Ok([false; 2])
    });
    assert_eq!(norms.unwrap(), [[true; 2]; 3]);
}

#[test]
fn a_rank_that_is_lost_before_a_norm_or_a_step_leaves_the_model_as_it_was() {
    for make in [adamw as fn() -> _, || AdamWConfig::new().init_fused()] {
        for clip in [None, Some(2.0), Some(f64::INFINITY)] {
            accelerator::launch(2, |accelerator| {
                let device = accelerator.device();
                let mut model = accelerator.prepare(Net::new(&device))?;
                let mut optimizer = optimizer(&accelerator, State::Sharded, make())?;
                for step in 0..3 {
                    let mut gradients = backward(&accelerator, &model, step)?;
                    if step == 2 && accelerator.rank() == 1 {
                        return Ok(());
                    }
                    let before = flat(&model);
                    if let Some(order) = clip {
                        gradients = gradients.clip(Clip::norm(0.1).of_order(order));
                    }
                    model = optimizer.step(0.02, model, gradients);
                    if step == 2 {
                        assert_eq!(optimizer.outcome(), StepOutcome::Lost);
                        assert_eq!(flat(&model), before);
                    }
                }
                let error = accelerator.wait_for_everyone().unwrap_err();
                assert!(error.is_collective(), "{error:?}");
                Ok(())
            })
            .unwrap();
        }
    }
}

/// The way in which a loop uses gradients. `Burns` and `Plain` do so in every third step.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Use {
    Clipped,
    ClippedByLargest,
    ClippedByValue,
    Burns,
    Plain,
    Stepped,
}

/// Trains on one sample per rank and step until rank 1 dies after one of its operations. Returns the number of steps
/// that rank 0 has made, if it could save, and the number of samples of 24 that are left.
fn left_after_a_death(usage: Use, at: usize) -> Option<(usize, usize)> {
    let parts = |accelerator: &Accelerator| {
        let train = LoaderBuilder::new(crate::common::ColumnBatcher)
            .batch_size(1)
            .build(crate::common::columns(24));
        accelerator.prepare((crate::common::line(&accelerator.device()), train))
    };
    let folder = tempfile::tempdir().unwrap();
    let steps = Mutex::new(None);
    let outcome = accelerator::launch(2, |accelerator| {
        let (mut model, train) = parts(&accelerator)?;
        let mut optimizer = optimizer(&accelerator, State::Sharded, adamw())?;
        let mut plain = accelerator.prepare(SgdConfig::new().init())?;
        let (rank, count) = (accelerator.rank(), AtomicUsize::new(0));
        accelerator.group().observe(move |_| {
            let dies = rank == 1 && count.fetch_add(1, Ordering::Relaxed) == at;
            assert!(!dies, "this rank dies here");
        })?;
        let mut stepped = 0;
        let mut train_all = || -> accelerator::Result<()> {
            for batch in train.epoch(0) {
                let batch = batch?;
                let loss = crate::common::distance(&model, &batch);
                let gradients = accelerator.backward(loss, &model, &batch)?;
                let gradients = match usage {
                    Use::Clipped => gradients.clip_norm(0.5),
                    Use::ClippedByLargest => {
                        gradients.clip(Clip::norm(0.5).of_order(f64::INFINITY))
                    }
                    Use::ClippedByValue => gradients.clip_value(0.1),
                    Use::Burns | Use::Plain | Use::Stepped => gradients,
                };
                let third = batch.step() % 3 == 2;
                if usage == Use::Burns && third {
                    if let Some(gradients) = gradients.into_params() {
                        model = SgdConfig::new().init().step(0.05, model.clone(), gradients);
                        stepped += 1;
                    }
                    continue;
                }
                let by = match usage {
                    Use::Plain if third => &mut plain,
                    _ => &mut optimizer,
                };
                model = by.step(0.05, model.clone(), gradients);
                stepped += usize::from(matches!(by.outcome(), StepOutcome::Stepped { .. }));
            }
            Ok(())
        };
        train_all().inspect_err(|_| {
            let saved = accelerator.save_emergency(folder.path(), (&model, &train));
            if rank == 0 && saved.is_ok_and(|saved| saved.is_some()) {
                *steps.lock().unwrap() = Some(stepped);
            }
        })
    });
    assert!(outcome.is_err());
    let stepped = steps.into_inner().unwrap()?;
    let accelerator = Accelerator::new().unwrap();
    let ((_, train), _) = accelerator
        .resume(folder.path(), parts(&accelerator).unwrap())
        .unwrap();
    let left = train.epoch(0).map(|batch| batch.unwrap().numbers.len());
    Some((stepped, left.sum()))
}

#[test]
fn samples_of_a_step_that_a_death_prevents_come_again_wherever_it_is() {
    let mut saved = 0;
    for usage in [
        Use::Clipped,
        Use::ClippedByLargest,
        Use::ClippedByValue,
        Use::Burns,
        Use::Plain,
        Use::Stepped,
    ] {
        for at in 10..26 {
            if let Some((steps, left)) = left_after_a_death(usage, at) {
                assert_eq!(left, 24 - 2 * steps, "{usage:?}, operation {at}");
                saved += 1;
            }
        }
    }
    assert!(saved > 50, "{saved}");
}

#[test]
fn a_window_may_be_opened_before_or_behind_the_first_step() {
    let [whole, sharded] = BOTH.map(|state| {
        let builder = Accelerator::builder().accumulation_steps(2);
        let outcome = builder.launch(2, |accelerator| {
            let (mut model, mut optimizer) = prepared(&accelerator, state)?;
            let backward = |model: &Net, step| backward(&accelerator, model, step);
            let _open = backward(&model, 0)?;
            let gradients = backward(&model, 1)?;
            let before = model.clone();
            let open = |model: &Net| backward(model, 2).map(drop);
            if accelerator.is_main_process() {
                open(&before)?;
                model = optimizer.step(0.02, model, gradients);
            } else {
                model = optimizer.step(0.02, model, gradients);
                open(&before)?;
            }
            let gradients = backward(&model, 3)?;
            Ok(flat(&optimizer.step(0.02, model, gradients)))
        });
        outcome.unwrap()
    });
    assert!(sharded == whole);
}

#[test]
fn what_all_ranks_do_with_gradients_is_not_done_by_one_and_says_so() {
    let errors = accelerator::launch(2, |accelerator| {
        let (mut model, mut optimizer) = prepared(&accelerator, State::Sharded)?;
        let backward = |model: &Net, step| backward(&accelerator, model, step);
        let gradients = backward(&model, 0)?;
        model = optimizer.step(0.02, model, gradients);
        let mut gradients = backward(&model, 1)?;
        assert!(gradients.norm_of_order(2.0).is_some());
        assert!(gradients.norm().is_some(), "it is known here");
        let gone = accelerator.on_main_process(|| gradients.into_params().is_none());
        assert_ne!(gone, Some(false));
        Ok(backward(&model, 2).unwrap_err().to_string())
    })
    .unwrap();
    for error in errors {
        assert!(
            error.contains("what all ranks do with gradients"),
            "{error}"
        );
    }
}
