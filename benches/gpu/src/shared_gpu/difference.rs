use std::error::Error;
use std::path::Path;

use safetensors::{Dtype, SafeTensors};

/// Returns the largest difference of an element between the tensors of two files, over the largest element of its
/// tensor in the first file.
///
/// # Errors
///
/// If a file cannot be read, if the files hold different tensors, or tensors other than f32. NaN is an error too.
pub(super) fn largest_difference(one: &Path, other: &Path) -> Result<f64, Box<dyn Error>> {
    let (one, other) = (std::fs::read(one)?, std::fs::read(other)?);
    let (one, other) = (
        SafeTensors::deserialize(&one)?,
        SafeTensors::deserialize(&other)?,
    );
    if one.names().len() != other.names().len() {
        return Err("expected the same tensors in both files".into());
    }
    let mut largest = 0.0_f64;
    for (name, tensor) in one.tensors() {
        let beside = other.tensor(&name)?;
        if tensor.dtype() != Dtype::F32
            || beside.dtype() != Dtype::F32
            || tensor.shape() != beside.shape()
        {
            return Err(format!("expected `{name}` in f32 and of one shape in both files").into());
        }
        let (mut top, mut apart) = (0.0_f64, 0.0_f64);
        for (a, b) in numbers(tensor.data()).zip(numbers(beside.data())) {
            if !(a.is_finite() && b.is_finite()) {
                return Err(format!("`{name}` has a number that is not finite").into());
            }
            top = top.max(a.abs());
            apart = apart.max((a - b).abs());
        }
        if apart > 0.0 {
            largest = largest.max(apart / top);
        }
    }
    Ok(largest)
}

fn numbers(bytes: &[u8]) -> impl Iterator<Item = f64> {
    let (numbers, _) = bytes.as_chunks::<4>();
    numbers
        .iter()
        .map(|&bytes| f64::from(f32::from_le_bytes(bytes)))
}

#[cfg(test)]
mod tests {
    use safetensors::tensor::TensorView;

    use super::*;

    fn write(path: &Path, tensors: &[(&str, &[f32])]) {
        let bytes: Vec<Vec<u8>> = tensors
            .iter()
            .map(|(_, values)| {
                values
                    .iter()
                    .flat_map(|value| value.to_le_bytes())
                    .collect()
            })
            .collect();
        let views = tensors.iter().zip(&bytes).map(|((name, values), bytes)| {
            let view = TensorView::new(Dtype::F32, vec![values.len()], bytes);
            (*name, view.unwrap_or_else(|error| panic!("{error}")))
        });
        let text = safetensors::serialize(views, None).unwrap_or_else(|error| panic!("{error}"));
        std::fs::write(path, text).unwrap_or_else(|error| panic!("{error}"));
    }

    #[test]
    fn each_tensor_counts_by_its_own_size() -> Result<(), Box<dyn Error>> {
        let folder = tempfile::tempdir()?;
        let (one, other) = (folder.path().join("one"), folder.path().join("other"));
        write(&one, &[("small", &[0.01, 0.0]), ("large", &[100.0, 1.0])]);
        write(
            &other,
            &[("small", &[0.01, 0.001]), ("large", &[100.0, 2.0])],
        );
        assert!((largest_difference(&one, &other)? - 0.1).abs() < 1e-6);
        assert_eq!(largest_difference(&one, &one)?, 0.0);
        write(
            &other,
            &[("small", &[f32::NAN, 0.0]), ("large", &[100.0, 1.0])],
        );
        assert!(largest_difference(&one, &other).is_err());
        write(&other, &[("small", &[0.01, 0.0])]);
        assert!(largest_difference(&one, &other).is_err());
        Ok(())
    }
}
