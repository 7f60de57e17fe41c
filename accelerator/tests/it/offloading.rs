//! Sharded units whose tensors are kept in files train to the bits of those in memory.

use std::panic::AssertUnwindSafe;

use accelerator::collective::Launch;
use accelerator::nn::{Units, recompute};
use accelerator::optim::{Manual, PreparedOptimizer};
use accelerator::train::{FsdpStrategy, TrainingArguments};
use accelerator::{AcceleratorBuilder, prelude::*};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::Tensor;

use crate::common::{assert_contains, assert_error, folder_in_memory};
use crate::sharded_units::{Course, Net, adam, assert_same, of_ranks, step};

#[test]
fn training_with_offloaded_units_is_bit_identical() {
    let folder = folder_on_disk();
    let plain = || Accelerator::builder().device(BackendKind::Flex);
    let offloaded =
        |builder: AcceleratorBuilder| builder.units(Units::Shard).offload_folder(folder.path());
    for ranks in [1, 2, 3] {
        for course in Course::ALL {
            let found = of_ranks(offloaded(plain()), ranks, course);
            let expected = of_ranks(plain().units(Units::Recompute), ranks, course);
            assert_same(&found, &expected, &format!("{ranks} ranks, {course:?}"));
        }
        let half = || plain().precision(Precision::F16);
        let found = of_ranks(offloaded(half()), ranks, Course::Clipped);
        let expected = of_ranks(half().units(Units::Recompute), ranks, Course::Clipped);
        assert_same(&found, &expected, &format!("{ranks} ranks, f16"));
    }
    for (ranks, units) in [(1, Units::Recompute), (2, Units::Shard)] {
        let several = || plain().accumulation_steps(2);
        let found = of_ranks(offloaded(several()), ranks, Course::Clipped);
        let expected = of_ranks(several().units(units), ranks, Course::Clipped);
        assert_same(&found, &expected, &format!("{ranks} ranks, accumulation"));
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

/// Large weights are in files after `init`; they and their moments still are after each step, a resume and a load.
#[test]
fn parameters_and_optimizer_state_stay_in_files() {
    const WEIGHT: usize = 120 * 120 * size_of::<f32>();
    let (folder, kept) = (folder_on_disk(), folder_in_memory());
    let builder = Accelerator::builder()
        .device(BackendKind::Flex)
        .units(Units::Shard)
        .offload_folder(folder.path());
    let accelerator = builder.launched_as(Launch::single()).build().unwrap();
    let held = || accelerator.offloaded_memory();
    let step = |model: Net, optimizer: &mut PreparedOptimizer<Manual>| {
        let x = Tensor::<2>::ones([4, 1], &accelerator.device());
        let gradients = accelerator.backward(model.forward(x).mean(), &model, 4)?;
        Ok::<_, Error>(optimizer.step(0.01, model, gradients))
    };
    let model = accelerator.init(Net::new);
    assert_eq!(held(), 2 * WEIGHT);
    let (mut model, mut optimizer) = accelerator.prepare((model, adam())).unwrap();
    assert_eq!(held(), 2 * WEIGHT);
    for _ in 0..2 {
        model = step(model, &mut optimizer).unwrap();
        assert_eq!(held(), 6 * WEIGHT);
    }
    accelerator
        .save_state(kept.path(), (&model, &optimizer))
        .unwrap();
    drop((model, optimizer));
    assert_eq!(held(), 0);
    let parts = (Net::new(&accelerator.device()), adam());
    let parts = accelerator.prepare(parts).unwrap();
    let ((mut model, mut optimizer), _) = accelerator.resume(kept.path(), parts).unwrap();
    model = step(model, &mut optimizer).unwrap();
    assert_eq!(held(), 6 * WEIGHT);
    let file = kept.path().join("model.safetensors");
    accelerator.save_model(&model, &file).unwrap();
    model = accelerator.load_model(model, &file).unwrap();
    model = step(model, &mut optimizer).unwrap();
    assert_eq!(held(), 6 * WEIGHT);
    drop(model);
}

/// A single rank does alone what several would have to do together.
#[test]
fn a_single_rank_with_offloaded_units_needs_no_others() {
    let folder = folder_on_disk();
    let norms = [Units::Recompute, Units::Shard].map(|units| {
        let builder = Accelerator::builder()
            .device(BackendKind::Flex)
            .units(units);
        let builder = match units {
            Units::Shard => builder.offload_folder(folder.path()),
            _ => builder,
        };
        let builder = builder.launched_as(Launch::single());
        let accelerator = builder.build().unwrap();
        let model = accelerator
            .prepare(Net::new(&accelerator.device()))
            .unwrap();
        let gradients = |rows| {
            let x = Tensor::<2>::ones([rows, 1], &accelerator.device());
            GradientsParams::from_grads(model.forward(x).mean().backward(), &model)
        };
        let (size, ()) = accelerator
            .find_executable_batch_size(4, &model, |size| {
                drop(gradients(size));
                Ok::<_, Error>(())
            })
            .unwrap();
        let averaged = accelerator.average(gradients(size), &model, 4).unwrap();
        let x = Tensor::<2>::ones([4, 1], &accelerator.device());
        let y = recompute(&model, x, |model, x| model.forward(x));
        let recomputed = accelerator.backward(y.mean(), &model, 4).unwrap();
        [averaged, recomputed].map(|mut gradients| gradients.norm().unwrap())
    });
    assert_eq!(norms[0], norms[1]);
    assert!(norms[0].iter().all(|norm| *norm > 0.0));
}

#[test]
fn unsupported_offload_settings_are_refused() {
    let folder = folder_on_disk();
    let builder = || {
        let builder = Accelerator::builder().launched_as(Launch::single());
        builder.device(BackendKind::Flex).units(Units::Shard)
    };
    let whole = builder().units(Units::Recompute);
    let error = whole.offload_folder(folder.path()).build().unwrap_err();
    assert_error(&error, Error::is_config, &["set `units` to `shard`"]);

    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    let error = builder().offload_folder(&file).build().unwrap_err();
    assert_error(&error, Error::is_config, &["no file can be created there"]);

    #[cfg(target_os = "linux")]
    {
        let error = builder().offload_folder("/dev/shm").build().unwrap_err();
        assert_error(&error, Error::is_config, &["its file system is in memory"]);
    }

    let accelerator = builder().offload_folder(folder.path()).build().unwrap();
    let stepped = std::panic::catch_unwind(AssertUnwindSafe(|| {
        step(&accelerator, AdamWConfig::new().init())
    }));
    let panic = stepped.unwrap_err();
    let text = panic.downcast_ref::<String>().unwrap();
    assert_contains(text, &["use a fused optimizer"]);
}

#[test]
fn a_trainers_argument_offloads() {
    let folder = folder_on_disk();
    let arguments = TrainingArguments {
        fsdp: FsdpStrategy::FullShard,
        offload_folder: Some(folder.path().to_owned()),
        ..TrainingArguments::default()
    };
    let builder = arguments.accelerator().device(BackendKind::Flex);
    let accelerator = builder.launched_as(Launch::single()).build().unwrap();
    let model = accelerator.init(Net::new);
    assert!(accelerator.offloaded_memory() > 0);
    drop(model);
}

/// Creates a temporary folder on disk, since offloading refuses tmpfs.
fn folder_on_disk() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}
