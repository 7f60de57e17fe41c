//! The mistakes of the first hour, each with the words by which its message is recognised.

use std::time::Duration;

use accelerator::prelude::*;
use burn::data::dataset::InMemDataset;
use burn::nn::{Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::tensor::{Device, Tensor};

use crate::common::assert_contains;

type Program = fn(Accelerator) -> Result<()>;

const MISTAKES: [(Program, &[&str]); 8] = [
    (
        forgets_to_prepare_the_model,
        &["this model was not prepared", "`Accelerator::prepare`"],
    ),
    (
        builds_on_another_device,
        &["records no gradients", "accelerator.device()"],
    ),
    (shuffles_by_rank, &["differs between ranks", "shuffle"]),
    (has_batches_of_nothing, &["loader 0", "batch size is 0"]),
    (has_no_data, &["no samples"]),
    (
        panics_on_one_rank,
        &["rank 1", "panicked", "index out of bounds"],
    ),
    (computes_without_end_on_one_rank, &["rank 1", "1 s"]),
    (
        calls_a_collective_on_one_rank,
        &["collectives are forbidden", "move it out of the closure"],
    ),
];

#[test]
fn each_mistake_has_a_message_that_says_what_to_do() {
    for (program, words) in MISTAKES {
        let builder = Accelerator::builder().progress_timeout(Duration::from_secs(1));
        let error = builder.launch(2, program).unwrap_err();
        assert_contains(&error.to_string(), words);
    }
}

fn line(device: &Device) -> Linear {
    LinearConfig::new(1, 1).init(device)
}

fn loader() -> LoaderBuilder<u32, Vec<u32>> {
    LoaderBuilder::from_fn(|items: Vec<u32>, _: &Device| items)
}

fn data() -> InMemDataset<u32> {
    InMemDataset::new((0..8).collect())
}

fn forgets_to_prepare_the_model(accelerator: Accelerator) -> Result<()> {
    let device = accelerator.device();
    let (model, _optimizer) = (line(&device), accelerator.prepare(SgdConfig::new().init())?);
    let loss = model.forward(Tensor::<2>::ones([2, 1], &device)).mean();
    accelerator.backward(loss, &model, 2).map(drop)
}

fn builds_on_another_device(accelerator: Accelerator) -> Result<()> {
    accelerator.prepare(line(&Device::default())).map(drop)
}

fn shuffles_by_rank(accelerator: Accelerator) -> Result<()> {
    let seed = accelerator.rank() as u64;
    let train = loader().batch_size(2).shuffle(seed).build(data());
    accelerator.prepare(train).map(drop)
}

fn has_batches_of_nothing(accelerator: Accelerator) -> Result<()> {
    accelerator
        .prepare(loader().batch_size(0).build(data()))
        .map(drop)
}

fn has_no_data(accelerator: Accelerator) -> Result<()> {
    let empty = InMemDataset::new(Vec::new());
    accelerator
        .prepare(loader().batch_size(2).build(empty))
        .map(drop)
}

fn panics_on_one_rank(accelerator: Accelerator) -> Result<()> {
    let scores: Vec<f32> = Vec::new();
    if accelerator.rank() == 1 {
        accelerator.print(scores[accelerator.rank()]);
    }
    accelerator.wait_for_everyone()
}

fn computes_without_end_on_one_rank(accelerator: Accelerator) -> Result<()> {
    if accelerator.rank() == 1 {
        // A test has to end.
        std::thread::sleep(Duration::from_secs(3));
    }
    accelerator.wait_for_everyone()
}

fn calls_a_collective_on_one_rank(accelerator: Accelerator) -> Result<()> {
    accelerator
        .on_main_process(|| accelerator.wait_for_everyone())
        .unwrap_or(Ok(()))
}
