//! Compares our trainer with Hugging Face's in f32.

#[path = "../huggingface/mod.rs"]
mod trainings;

use burn::tensor::FloatDType::F32;

use self::trainings::{check, check_banners};

#[test]
fn a_cnn_is_trained_as_by_hugging_face() {
    check_banners("huggingface::trains_a_cnn", "cnn", F32);
}

#[test]
#[ignore = "a part of another test"]
fn trains_a_cnn() {
    check("cnn", F32, 1e-4);
}
