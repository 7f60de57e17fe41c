//! Draws from the device's generator.

use std::sync::mpsc::channel;
use std::thread::{current, scope, sleep};
use std::time::Duration;

use crate::alone;
use crate::common::{assert_error, columns, devices, flat};
use accelerator::data::Loader;
use accelerator::prelude::*;
use burn::data::dataloader::batcher::Batcher;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Distribution, Tensor};

fn draw(device: &Device) -> Vec<f32> {
    let drawn = Tensor::<1>::random([4], Distribution::Default, device);
    drawn.into_data().try_to_vec().unwrap()
}

/// The numbers drawn for a batch, and the thread that drew them.
#[derive(Debug)]
struct Drawn {
    numbers: Vec<f32>,
    thread: String,
}

struct Drawing;

impl Batcher<usize, Drawn> for Drawing {
    fn batch(&self, _items: Vec<usize>, device: &Device) -> Drawn {
        let mut numbers = draw(device);
        // The step draws in the meantime.
        sleep(Duration::from_micros(300));
        numbers.extend(draw(device));
        Drawn {
            numbers,
            thread: current().name().unwrap_or_default().to_owned(),
        }
    }
}

/// A batcher that draws nothing.
struct Quiet;

impl Batcher<usize, Drawn> for Quiet {
    fn batch(&self, _items: Vec<usize>, _device: &Device) -> Drawn {
        Drawn {
            numbers: Vec::new(),
            thread: current().name().unwrap_or_default().to_owned(),
        }
    }
}

const BATCHES: usize = 20;

#[derive(Clone, Copy, Debug)]
enum Of {
    DataSet,
    Dispatched,
    Parts,
    Stream,
}

impl Of {
    fn loader(
        self,
        batcher: impl Batcher<usize, Drawn> + 'static,
        workers: usize,
    ) -> Loader<Drawn> {
        let samples = 2 * BATCHES;
        let builder = LoaderBuilder::new(batcher)
            .batch_size(2)
            .num_workers(workers);
        let numbers = move |_part| (0..samples).map(std::io::Result::Ok);
        match self {
            Self::DataSet => builder.build(columns(samples)),
            Self::Dispatched => builder.build_dispatched_stream(numbers),
            Self::Parts => builder.build_sharded_stream(numbers),
            Self::Stream => builder.build_stream(numbers),
        }
    }
}

const ALL: [Of; 4] = [Of::DataSet, Of::Dispatched, Of::Parts, Of::Stream];

/// Returns the draws of batches and steps in an epoch, from batch `skip` on.
fn epoch(kind: BackendKind, of: Of, workers: usize, epoch: u64, skip: u64) -> Vec<[Vec<f32>; 2]> {
    let accelerator = Accelerator::builder().device(kind).seed(3).build().unwrap();
    let loader = accelerator.prepare(of.loader(Drawing, workers)).unwrap();
    let batches = loader.epoch(epoch).skip_first_batches(skip);
    let drawn = batches.map(|batch| {
        let mut of_step = Vec::new();
        for _ in 0..4 {
            of_step.extend(draw(&accelerator.device()));
            sleep(Duration::from_micros(100));
        }
        [batch.unwrap().into_inner().numbers, of_step]
    });
    drawn.collect()
}

#[test]
fn what_batches_and_steps_draw_follows_their_place_and_no_worker() {
    let _alone = alone();
    for kind in devices() {
        for of in ALL {
            let expected = epoch(kind, of, 0, 0, 0);
            assert_eq!(expected.len(), BATCHES);
            let other = epoch(kind, of, 0, 1, 0);
            let all: Vec<_> = expected.iter().chain(&other).flatten().collect();
            for (at, one) in all.iter().enumerate() {
                assert!(!all[..at].contains(one), "{of:?}: nothing comes twice");
            }
            for workers in [0, 1, 3] {
                let whole = epoch(kind, of, workers, 0, 0);
                assert!(whole == expected, "{of:?} with {workers} workers");
                let rest = epoch(kind, of, workers, 0, 7);
                assert!(
                    rest == expected[7..],
                    "{of:?} with {workers} workers, from 7 on"
                );
            }
        }
    }
}

#[test]
fn batches_that_draw_nothing_are_made_by_workers() {
    let _alone = alone();
    for kind in devices() {
        for of in ALL {
            let threads = |loader: Loader<Drawn>| {
                let accelerator = Accelerator::builder().device(kind).build().unwrap();
                let loader = accelerator.prepare(loader).unwrap();
                [0, 1].map(|epoch| -> Vec<String> {
                    let batches = loader.epoch(epoch);
                    let threads = batches.map(|batch| batch.unwrap().into_inner().thread);
                    threads.collect()
                })
            };
            let own = current().name().unwrap_or_default().to_owned();
            let [first, second] = threads(of.loader(Quiet, 2));
            // Batches read before this was known are made where they are needed.
            assert_eq!(first[BATCHES - 1], "loader", "{of:?}");
            assert!(second.iter().all(|thread| thread == "loader"), "{of:?}");
            for loader in [of.loader(Drawing, 2), of.loader(Quiet, 0)] {
                let mut threads = threads(loader).into_iter().flatten();
                assert!(threads.all(|thread| thread == own), "{of:?}");
            }
        }
    }
}

#[test]
fn a_batch_that_is_asked_for_leaves_a_model_alone_that_is_being_built() {
    let _alone = alone();
    let accelerator = Accelerator::builder().seed(5).build().unwrap();
    let build =
        |device: &Device| -> [Linear; 2] { [(); 2].map(|()| LinearConfig::new(3, 2).init(device)) };
    let first_of = |layers: &[Linear; 2]| drop(layers[0].weight.val());
    let expected = accelerator.init(|device| {
        let layers = build(device);
        first_of(&layers);
        layers.to_vec()
    });
    let loader = accelerator.prepare(Of::DataSet.loader(Quiet, 0)).unwrap();
    let (begun, has_begun) = channel();
    let (asked, was_asked) = channel();
    let loader = &loader;
    let found = scope(|scope| {
        scope.spawn(move || {
            has_begun.recv().unwrap();
            let batch = loader.epoch(0).next();
            // The batch may arrive when the model is built and the receiver is gone.
            let _ = asked.send(batch.is_some());
        });
        accelerator.init(|device| {
            let layers = build(device);
            first_of(&layers);
            begun.send(()).unwrap();
            let _ = was_asked.recv_timeout(Duration::from_millis(300));
            layers.to_vec()
        })
    });
    assert_eq!(flat(&found), flat(&expected));
}

#[test]
fn a_batcher_that_panics_is_an_error_with_and_without_workers() {
    struct Panics;
    impl Batcher<usize, Drawn> for Panics {
        fn batch(&self, items: Vec<usize>, _device: &Device) -> Drawn {
            panic!("no batch of {items:?}");
        }
    }
    let _alone = alone();
    let accelerator = Accelerator::new().unwrap();
    for of in ALL {
        for workers in [0, 1] {
            let loader = accelerator.prepare(of.loader(Panics, workers)).unwrap();
            let mut batches = loader.epoch(0);
            let error = batches.next().unwrap().unwrap_err();
            assert_error(&error, Error::is_panic, &["no batch of [0, 1]"]);
            assert!(batches.next().is_none());
        }
    }
}

#[test]
fn an_accelerator_is_not_built_while_a_model_is_drawn() {
    let _alone = alone();
    let accelerator = Accelerator::new().unwrap();
    let build = |device: &Device| -> Linear { LinearConfig::new(2, 2).init(device) };
    let values = |model: Linear| model.weight.val().into_data();
    let alone = values(accelerator.init(build));
    accelerator.init(|device| {
        for outcome in [
            Accelerator::new().map(drop),
            accelerator::launch(2, |_| Ok(())).map(drop),
        ] {
            let words = ["`Accelerator::init`"];
            assert_error(&outcome.unwrap_err(), Error::is_misuse, &words);
        }
        // A nested model is drawn from the seed, as if it stood alone.
        assert_eq!(values(accelerator.init(build)), alone);
        build(device)
    });
    // The turn has ended, whatever happened within it.
    Accelerator::new().unwrap();
    assert_eq!(values(accelerator.init(build)), alone);
}
