//! One rank and two ranks train on the same samples.

use accelerator::local::LocalSgd;
use accelerator::prelude::*;
use accelerator::{Compression, Overlap, Oversubscription};
use burn::nn::Linear;
use burn::optim::SgdConfig;

use crate::common::{distance, flat, line, loader, of_every_rank};
use crate::harness::{Reading, Setting, State, cpu, is_there};

#[test]
fn two_ranks_train_as_one_does_and_as_the_cpu() {
    if !is_there() {
        return;
    }
    for (accumulation, steps) in [(1, 12), (2, 52)] {
        let of = |ranks| Setting {
            accumulation,
            steps,
            ..Setting::new(ranks)
        };
        let one = of(1).run();
        let (first, last) = one.ends();
        assert!(steps < 50 || last < 0.5 * first, "{:?}", one.losses);
        of(2).run().assert_near(&one, 1e-4);
        if let Some(kind) = cpu() {
            Setting { kind, ..of(1) }.run().assert_near(&one, 1e-4);
        }
    }
}

#[test]
fn when_a_loss_is_read_changes_nothing() {
    if !is_there() {
        return;
    }
    for (ranks, accumulation) in [(1, 1), (1, 2), (2, 1), (2, 2)] {
        let each = Setting {
            accumulation,
            ..Setting::new(ranks)
        };
        let last = Setting {
            reading: Reading::LastStep,
            ..each
        };
        let (each, last) = (each.run(), last.run());
        assert!(each.parameters == last.parameters);
        assert_eq!(each.losses.last(), last.losses.last());
    }
}

#[test]
fn a_sharded_optimizer_steps_alike() {
    if !is_there() {
        return;
    }
    let whole = Setting {
        clip: |gradients| gradients.clip_norm(0.5),
        ..Setting::new(2)
    };
    let sharded = Setting {
        state: State::Sharded,
        ..whole
    };
    sharded.run().assert_near(&whole.run(), 1e-5);
}

#[test]
fn compressed_gradients_train_about_the_same() {
    if !is_there() {
        return;
    }
    let exact = Setting::new(2).run();
    for compression in [Compression::Bf16, Compression::F16] {
        for overlap in [Overlap::Off, Overlap::On] {
            let compressed = Setting {
                compression,
                overlap,
                ..Setting::new(2)
            };
            let compressed = compressed.run();
            assert!(compressed.parameters != exact.parameters);
            compressed.assert_near(&exact, 0.05);
            if let Some(kind) = cpu() {
                let there = Setting {
                    compression,
                    overlap,
                    kind,
                    ..Setting::new(2)
                };
                compressed.assert_near(&there.run(), 0.02);
            }
        }
    }
}

/// Trains with Burn's own optimizer.
fn with_burns_optimizer(ranks: usize) -> Vec<f32> {
    let rows = Accelerator::builder()
        .device(BackendKind::Wgpu)
        .oversubscription(Oversubscription::Allow)
        .launch(ranks, |accelerator| {
            let parts = (line(&accelerator.device()), loader(26, 8 / ranks));
            let (mut model, train): (Linear, _) = accelerator.prepare(parts)?;
            let mut sgd = SgdConfig::new().init();
            for batch in train.epoch(0) {
                let batch = batch?;
                let loss = distance(&model, &batch);
                let gradients = accelerator.backward(loss, &model, &batch)?;
                if let Some(gradients) = gradients.clip_norm(0.5).into_params() {
                    model = sgd.step(0.1, model, gradients);
                }
            }
            Ok(flat(&model))
        });
    of_every_rank(rows.unwrap())
}

#[test]
fn burns_own_optimizer_takes_what_ranks_have_averaged() {
    if !is_there() {
        return;
    }
    let (one, two) = (with_burns_optimizer(1), with_burns_optimizer(2));
    assert!(one != [0.5, 0.25], "it has learnt something");
    crate::common::assert_close(&two, &one, 1e-5);
}

/// Returns the weights of two ranks after local steps, with an average after every third.
fn local(kind: BackendKind) -> Vec<f32> {
    let rows = Accelerator::builder()
        .device(kind)
        .oversubscription(Oversubscription::Allow)
        .launch(2, |accelerator| {
            let parts = (
                line(&accelerator.device()),
                SgdConfig::new().init(),
                loader(37, 2),
            );
            let (mut model, mut optimizer, train) = accelerator.prepare(parts)?;
            let mut local: LocalSgd = LocalSgdConfig::new(3).init(&accelerator, &model)?;
            for batch in train.epoch(0) {
                let batch = batch?;
                let loss = distance(&model, &batch);
                let gradients = local.backward(loss, &model, &batch)?;
                model = optimizer.step(0.1, model, gradients);
                local.step(&mut model)?;
            }
            local.finish(&mut model)?;
            Ok(flat(&model))
        });
    of_every_rank(rows.unwrap())
}

#[test]
fn local_sgd_averages_what_ranks_have_learnt() {
    if !is_there() {
        return;
    }
    let here = local(BackendKind::Wgpu);
    assert!(here != [0.5, 0.25], "it has learnt something");
    if let Some(kind) = cpu() {
        crate::common::assert_close(&here, &local(kind), 1e-5);
    }
}
