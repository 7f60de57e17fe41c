//! Compares our trainer with Hugging Face's in f64.

#[path = "../huggingface/mod.rs"]
mod trainings;

use burn::tensor::FloatDType::F64;

use self::trainings::{check, check_banners};

#[test]
fn a_line_is_trained_as_by_hugging_face() {
    check_banners("huggingface::trains_a_line", "line", F64);
}

#[test]
#[ignore = "a part of another test"]
fn trains_a_line() {
    check("line", F64, 1e-9);
}

#[test]
fn a_transformer_is_trained_as_by_hugging_face() {
    check_banners("huggingface::trains_a_transformer", "transformer", F64);
}

#[test]
#[ignore = "a part of another test"]
fn trains_a_transformer() {
    check("transformer", F64, 1e-6);
}

#[test]
fn a_cnn_is_trained_as_by_hugging_face() {
    check_banners("huggingface::trains_a_cnn", "cnn", F64);
}

#[test]
#[ignore = "a part of another test"]
fn trains_a_cnn() {
    check("cnn", F64, 1e-7);
}
