//! Models are the same on every rank and on disk.

use crate::common::checkpoints::names;
use crate::common::{assert_chain, assert_error, devices, flat, line};
use accelerator::prelude::*;
use burn::module::{Module, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::tensor::{Device, TensorData};

#[derive(Debug, Module)]
struct Net {
    conv: Conv2d,
    norm: BatchNorm,
    output: Linear,
}

impl Net {
    fn new(device: &Device, outputs: usize) -> Self {
        Self {
            conv: Conv2dConfig::new([1, 2], [3, 3]).init(device),
            norm: BatchNormConfig::new(2).init(device),
            output: LinearConfig::new(8, outputs).init(device),
        }
    }
}

#[test]
fn prepare_gives_every_rank_rank_zeros_values_and_ids() {
    for kind in devices() {
        let ranks = Accelerator::builder()
            .device(kind)
            .launch(3, |accelerator| {
                let device = accelerator.device();
                // The models differ only in this rank's number.
                let value = accelerator.rank() as f32;
                let mut model = Net::new(&device, 3);
                let weight = TensorData::new(vec![value; 8 * 3], [8, 3]);
                model.output.weight = Param::from_data(weight, &device);
                let model = accelerator.prepare(model)?;
                let ids = (model.conv.weight.id.val(), model.output.weight.id.val());
                Ok((
                    flat(&model),
                    ids,
                    model.output.weight.val().is_require_grad(),
                ))
            })
            .unwrap();
        assert_eq!(ranks[0], ranks[1]);
        assert_eq!(ranks[0], ranks[2]);
        assert!(ranks[0].2, "still trainable");
    }
}

#[test]
fn a_model_that_differs_names_rank_and_path() {
    let error = accelerator::launch(3, |accelerator| {
        let outputs = if accelerator.rank() == 2 { 4 } else { 3 };
        accelerator
            .prepare(Net::new(&accelerator.device(), outputs))
            .map(|_| ())
    })
    .unwrap_err();
    let words = ["rank 2", "`output.weight`", "[8, 4]", "[8, 3]"];
    assert_error(&error, Error::is_model, &words);
}

#[cfg(unix)]
#[test]
fn saving_replaces_files_only_and_keeps_links() {
    use std::os::unix::fs::{PermissionsExt, symlink};

    let folder = tempfile::tempdir().unwrap();
    let (file, link) = (folder.path().join("file"), folder.path().join("link"));
    std::fs::write(&file, "old").unwrap();
    let plain = std::fs::metadata(&file).unwrap().permissions().mode();
    symlink("file", &link).unwrap();
    let accelerator = Accelerator::new().unwrap();
    let model = line(&accelerator.device());
    accelerator.save_model(&model, &link).unwrap();
    assert!(link.is_symlink(), "the link stays");
    assert_ne!(
        std::fs::read(&file).unwrap(),
        b"old",
        "its target is replaced"
    );
    let mode = std::fs::metadata(&file).unwrap().permissions().mode();
    assert_eq!(mode, plain, "as any file that is made here");

    let error = accelerator.save_model(&model, "/dev/null").unwrap_err();
    assert_chain(&error, Error::is_io, &["regular file"]);
    let error = accelerator.save_model(&model, folder.path()).unwrap_err();
    assert!(error.is_io(), "{error:?}");

    // No other file is left.
    accelerator.save_model(&model, &file).unwrap();
    assert_eq!(names(folder.path()), ["file", "link"]);
}

#[test]
fn a_file_that_cannot_be_written_or_read_is_an_error_on_every_rank() {
    let errors = accelerator::launch(2, |accelerator| {
        let model = accelerator.prepare(line(&accelerator.device()))?;
        Ok(accelerator
            .save_model(&model, "/nonexistent/folder/model.safetensors")
            .unwrap_err())
    })
    .unwrap();
    for error in errors {
        assert_chain(&error, Error::is_io, &["/nonexistent/folder"]);
    }
}
