//! Errors of communication name a line of the program and none of the library.

use std::sync::{Arc, Mutex};

use crate::common::{ColumnBatcher, columns, line, loader};
use accelerator::checkpoint::PerRank;
use accelerator::collective::internal::OpEvent;
use accelerator::nn::SyncBatchNorm;
use accelerator::optim::Sharded;
use accelerator::prelude::*;
use burn::module::Module;
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Tensor};

/// Pairs of the name of an operation and the place that its errors name.
type Notes = Arc<Mutex<Vec<(&'static str, String)>>>;

/// Starts to record the operations of a rank, which can have one observer.
fn observed(accelerator: &Accelerator) -> Notes {
    let notes = Notes::default();
    let noted = notes.clone();
    let observer = move |operation: &OpEvent| {
        let place = operation.place().to_string();
        noted.lock().unwrap().push((operation.name, place));
    };
    accelerator.group().observe(observer).unwrap();
    notes
}

/// Asserts that the operations since the last call include these and were all called from this file.
#[track_caller]
fn assert_ours(notes: &Notes, there: &[&str]) {
    let notes = core::mem::take(&mut *notes.lock().unwrap());
    for name in there {
        assert!(notes.iter().any(|(noted, _)| noted == name), "{notes:?}");
    }
    for (name, place) in &notes {
        assert!(place.contains("tests/it/places.rs:"), "{name} at {place}");
    }
}

#[derive(Debug, Module)]
struct Net {
    input: Linear,
    norm: BatchNorm,
}

impl Net {
    fn new(device: &Device) -> Self {
        Self {
            input: LinearConfig::new(1, 64).init(device),
            norm: BatchNormConfig::new(64).init(device),
        }
    }
}

#[test]
fn checkpoints_with_all_their_parts() {
    let folder = tempfile::tempdir().unwrap();
    accelerator::launch(2, |accelerator| {
        let notes = observed(&accelerator);
        let optimizer = Sharded(AdamWConfig::new().init());
        let parts = (accelerator.init(Net::new), optimizer, loader(8, 2));
        let (mut model, mut optimizer, train) = accelerator.prepare(parts)?;
        let (other, best) = (accelerator.prepare(line(&accelerator.device()))?, 0.5);
        let diloco = DiLoCoConfig::new(2).init(&accelerator, &other)?;
        for batch in train.epoch(0).take(1) {
            let batch = batch?;
            let hidden = model.input.forward(batch.values.clone());
            let loss = model.norm.forward(hidden).powi_scalar(4).mean();
            let gradients = accelerator.backward(loss, &model, &batch)?;
            model = optimizer.step(0.1, model, gradients);
        }
        let ema = Ema::new(&model, 0.9);
        notes.lock().unwrap().clear();

        let saved = (
            &model,
            &optimizer,
            &train,
            &ema,
            &other,
            &diloco,
            Object(&best),
            PerRank(&best),
        );
        accelerator.save_state(folder.path(), saved)?;
        // The operations exchange votes, running statistics, the layout of a part, and a sharded state.
        let operations = ["all_gather_object", "all_gather", "all_reduce"];
        assert_ours(&notes, &operations);
        accelerator.save_state_async(folder.path(), saved)?.wait()?;
        assert_ours(&notes, &["all_gather_varied", "broadcast_object"]);

        let parts = (
            model,
            optimizer,
            train,
            ema,
            other,
            diloco,
            Object(best),
            PerRank(best),
        );
        let (_, position) = accelerator.resume(folder.path(), parts)?;
        assert_eq!(position.step(), 1);
        assert_ours(&notes, &["broadcast", "broadcast_object"]);
        Ok(())
    })
    .unwrap();
}

#[test]
fn loaders_whose_ranks_meet() {
    accelerator::launch(2, |accelerator| {
        let notes = observed(&accelerator);
        let numbers = |_part| (0..6_usize).map(std::io::Result::Ok);
        let builder = || LoaderBuilder::new(ColumnBatcher).batch_size(2);
        let parts = (
            builder().build_dispatched_stream(numbers),
            builder().build_sharded_stream(numbers),
            builder()
                .sampler(|_epoch: u64| (0..6).rev().collect::<Vec<u64>>())
                .build(columns(6)),
        );
        let (dispatched, in_parts, sampled) = accelerator.prepare(parts)?;
        assert_ours(&notes, &[]);
        let all = |train: &PreparedLoader<_>| train.epoch(0).collect::<Result<Vec<_>>>();
        all(&dispatched)?;
        assert_ours(&notes, &["scatter_object", "all_gather_object"]);
        all(&in_parts)?;
        assert_ours(&notes, &["all_gather_object"]);
        all(&sampled)?;
        assert_ours(&notes, &["all_gather_object"]);
        Ok(())
    })
    .unwrap();
}

#[test]
fn layers_over_all_ranks() {
    accelerator::launch(2, |accelerator| {
        let norm = BatchNormConfig::new(1).init(&accelerator.device());
        let norm = accelerator.prepare(SyncBatchNorm::of(norm, &accelerator))?;
        let notes = observed(&accelerator);
        let values = [[0.5], [accelerator.rank() as f64]];
        let input = Tensor::<2>::from_data(values, &accelerator.device()).require_grad();
        let output = norm.forward(input, 2);
        assert_ours(&notes, &["all_reduce"]);
        drop(output.powi_scalar(3).mean().backward());
        assert_ours(&notes, &["all_reduce"]);
        Ok(())
    })
    .unwrap();
}
