//! Helpers that the tests of this folder share.
#![allow(dead_code, unreachable_pub, reason = "each test uses a part of it")]

pub mod checkpoints;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use accelerator::collective::internal::{Rendezvous, StoreHost, StoreServer};
use accelerator::collective::{Launch, Topology, TransportKind};
use accelerator::nn::Unit;
use accelerator::optim::Manual;
use accelerator::prelude::*;
use accelerator::{AcceleratorBuilder, Weight};
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::nn::loss::{MseLoss, Reduction};
use burn::nn::transformer::{TransformerEncoderConfig, TransformerEncoderLayer};
use burn::nn::{Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::tensor::{Device, Tensor, TensorData};

/// Returns the CPU devices of this build. Tests run on each of them.
pub fn devices() -> impl Iterator<Item = BackendKind> {
    [BackendKind::Flex, BackendKind::NdArray]
        .into_iter()
        .filter(|kind| kind.is_compiled_in())
}

/// A value for each sample, in a column, with the samples' numbers.
#[derive(Clone, Debug)]
pub struct Column {
    pub numbers: Vec<usize>,
    pub values: Tensor<2>,
}

pub struct ColumnBatcher;

impl Batcher<usize, Column> for ColumnBatcher {
    fn batch(&self, items: Vec<usize>, device: &Device) -> Column {
        let values: Vec<f32> = items.iter().map(|&item| item as f32 / 10.0 - 1.0).collect();
        let shape = [items.len(), 1];
        Column {
            values: Tensor::from_data(TensorData::new(values, shape), device),
            numbers: items,
        }
    }
}

pub fn columns(samples: usize) -> InMemDataset<usize> {
    InMemDataset::new((0..samples).collect())
}

pub fn loader(samples: usize, batch_size: usize) -> accelerator::data::Loader<Column> {
    LoaderBuilder::new(ColumnBatcher)
        .batch_size(batch_size)
        .build(columns(samples))
}

/// An encoder whose layers are units.
#[derive(Debug, Module)]
pub struct Encoder {
    layers: Vec<Unit<TransformerEncoderLayer>>,
}

impl Encoder {
    pub fn new(layers: usize, dropout: f64, device: &Device) -> Self {
        let config = TransformerEncoderConfig::new(16, 32, 2, layers).with_dropout(dropout);
        let layer = || Unit::new(TransformerEncoderLayer::new(&config, device));
        Self {
            layers: (0..layers).map(|_| layer()).collect(),
        }
    }

    /// Returns a loss of sequences of `[batch, length, 16]`.
    pub fn loss(&self, x: Tensor<3>) -> Tensor<1> {
        let x = self.layers.iter().fold(x, |x, layer| {
            layer.run(x, |layer, x| layer.forward(x, None, None))
        });
        x.powi_scalar(2).mean()
    }
}

/// Returns a line whose weights are known.
pub fn line(device: &Device) -> Linear {
    let mut line: Linear = LinearConfig::new(1, 1).init(device);
    line.weight = Param::from_data(TensorData::from([[0.5_f32]]), device);
    line.bias = Some(Param::from_data(TensorData::from([0.25_f32]), device));
    line
}

/// Returns a layer whose weights are always the same, even if other tests draw from the generator at the same time.
pub fn linear(inputs: usize, outputs: usize, device: &Device) -> Linear {
    let weights = (0..inputs * outputs).map(|i| (i as f32 * 1.7).sin() / (inputs as f32).sqrt());
    let weights = TensorData::new(weights.collect::<Vec<_>>(), [inputs, outputs]);
    let mut linear: Linear = LinearConfig::new(inputs, outputs).init(device);
    linear.weight = Param::from_data(weights, device);
    linear.bias = Some(Param::from_data(vec![0.1_f32; outputs].as_slice(), device));
    linear
}

/// Returns the squared distance from `3 x - 1`.
pub fn distance(model: &Linear, batch: &Column) -> Tensor<1> {
    let wanted = batch.values.clone() * 3.0 - 1.0;
    MseLoss::new().forward(model.forward(batch.values.clone()), wanted, Reduction::Mean)
}

/// Prepares a line, plain gradient descent, and a loader.
pub fn learner(
    accelerator: &Accelerator,
    train: accelerator::data::Loader<Column>,
) -> Result<(Linear, PreparedOptimizer<Manual>, PreparedLoader<Column>)> {
    accelerator.prepare((line(&accelerator.device()), SgdConfig::new().init(), train))
}

/// Prepares a line and plain gradient descent.
pub fn line_and_sgd(accelerator: &Accelerator) -> Result<(Linear, PreparedOptimizer<Manual>)> {
    accelerator.prepare((line(&accelerator.device()), SgdConfig::new().init()))
}

/// Makes a step, or a micro-step, by the distance of a batch.
pub fn learn(
    accelerator: &Accelerator,
    model: Linear,
    optimizer: &mut PreparedOptimizer<Manual>,
    rate: f64,
    batch: &Batch<Column>,
) -> Result<Linear> {
    let gradients = accelerator.backward(distance(&model, batch), &model, batch)?;
    Ok(optimizer.step(rate, model, gradients))
}

/// Makes a step by the mean output for an input of ones.
pub fn learn_ones(
    accelerator: &Accelerator,
    model: Linear,
    optimizer: &mut PreparedOptimizer<Manual>,
    weight: impl Into<Weight>,
) -> Result<Linear> {
    let input = Tensor::<2>::ones([2, 1], &accelerator.device());
    let gradients = accelerator.backward(model.forward(input).mean(), &model, weight)?;
    Ok(optimizer.step(0.1, model, gradients))
}

/// Counts the operations of a rank from now on.
pub fn counted(accelerator: &Accelerator) -> Arc<AtomicUsize> {
    let count = Arc::new(AtomicUsize::new(0));
    let counter = count.clone();
    let observed = accelerator.group().observe(move |_| {
        counter.fetch_add(1, Ordering::Relaxed);
    });
    observed.unwrap();
    count
}

/// Runs ranks in threads that are connected as processes are, and returns their outcomes. `place` adds the local rank.
pub fn connected<T: Send>(
    ranks: usize,
    place: impl Fn(Topology) -> Topology,
    body: impl Fn(usize, AcceleratorBuilder) -> Result<T> + Sync,
) -> Vec<Result<T>> {
    let store = StoreServer::bind(("127.0.0.1", 0), ranks, None).unwrap();
    let rendezvous = Rendezvous::new("127.0.0.1", store.local_addr().port());
    let rendezvous = rendezvous.with_store(StoreHost::Launcher);
    std::thread::scope(|scope| {
        let start = |rank| {
            let topology = place(Topology::new(rank, ranks).unwrap());
            let launch = Launch::new(topology, rendezvous.clone());
            let builder = Accelerator::builder().launched_as(launch);
            let builder = builder.transport(TransportKind::Tcp);
            let body = &body;
            scope.spawn(move || body(rank, builder))
        };
        let threads: Vec<_> = (0..ranks).map(start).collect();
        let ended = threads.into_iter().map(|thread| thread.join().unwrap());
        ended.collect()
    })
}

/// Runs an ignored test of this program in a process of its own with the variable set. Tells whether it succeeded, and
/// returns its output.
///
/// # Panics
/// Panics if there is no such test.
pub fn child(test: &str, name: &str, value: &str) -> (bool, String) {
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--ignored", "--nocapture"])
        .env(name, value)
        .output()
        .unwrap();
    let [stdout, stderr] = [&output.stdout, &output.stderr].map(|it| String::from_utf8_lossy(it));
    assert!(stdout.contains("running 1 test"), "{test}: {stdout}");
    (output.status.success(), format!("{stdout}{stderr}"))
}

/// Returns a folder in memory if the system has one, since hundreds of saves would wait for the disk.
pub fn folder_in_memory() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm")
        .or_else(|_| tempfile::tempdir())
        .unwrap()
}

/// Returns a model whose values are always the same, even if other tests draw from the generator at the same time.
pub fn known<M: Module>(model: M) -> M {
    known_within(0.3, model)
}

/// Returns such a model whose values are within that distance of their mean.
pub fn known_within<M: Module>(distance: f32, model: M) -> M {
    struct Known {
        count: f32,
        distance: f32,
    }
    impl ModuleMapper for Known {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let (id, old, mapper) = param.consume();
            // A variance must not be negative.
            let mean = if D == 1 { 0.5 } else { 0.0 };
            let values = (0..old.shape().num_elements()).map(|_| {
                self.count += 1.0;
                mean + self.distance * (self.count * 1.7).sin()
            });
            let values = TensorData::new(values.collect::<Vec<f32>>(), old.shape());
            let values = values.convert_dtype(old.dtype());
            let new = Tensor::from_data(values, (&old.device(), old.dtype()));
            Param::from_mapped_value(id, new.set_require_grad(old.is_require_grad()), mapper)
        }
    }
    let count = 0.0;
    model.map(&mut Known { count, distance })
}

/// Returns every float parameter, one after the other.
pub fn flat<M: Module>(model: &M) -> Vec<f32> {
    struct Flat(Vec<f32>);
    impl ModuleVisitor for Flat {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0
                .extend(param.val().into_data().try_to_vec::<f32>().unwrap());
        }
    }
    let mut flat = Flat(Vec::new());
    model.visit(&mut flat);
    flat.0
}

/// Returns the values of the ranks, which must agree to the bit.
pub fn of_every_rank(outcomes: Vec<Vec<f32>>) -> Vec<f32> {
    let bits = |values: &Vec<f32>| {
        values
            .iter()
            .map(|value| value.to_bits())
            .collect::<Vec<_>>()
    };
    for outcome in &outcomes {
        assert_eq!(
            bits(outcome),
            bits(&outcomes[0]),
            "every rank holds the same bits"
        );
    }
    outcomes.into_iter().next().unwrap()
}

pub fn assert_close(ours: &[f32], theirs: &[f32], bound: f32) {
    assert_eq!(ours.len(), theirs.len());
    for (ours, theirs) in ours.iter().zip(theirs) {
        assert!(
            (ours - theirs).abs() <= bound,
            "{ours} is not {theirs} to {bound}"
        );
    }
}

/// Asserts the kind of an error, and that its message contains all of the words.
#[track_caller]
pub fn assert_error(error: &Error, is_kind: fn(&Error) -> bool, words: &[&str]) {
    assert!(is_kind(error), "{error:?}");
    assert_contains(&error.to_string(), words);
}

/// Asserts so of the errors of all ranks.
#[track_caller]
pub fn assert_errors(errors: Vec<Error>, is_kind: fn(&Error) -> bool, words: &[&str]) {
    for error in errors {
        assert_error(&error, is_kind, words);
    }
}

/// Asserts the kind of an error, and that its message and those of its causes contain all of the words.
#[track_caller]
pub fn assert_chain(error: &Error, is_kind: fn(&Error) -> bool, words: &[&str]) {
    assert!(is_kind(error), "{error:?}");
    assert_contains(&format!("{error:?}"), words);
}

#[track_caller]
pub fn assert_contains(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "`{word}` is missing in: {text}");
    }
}
