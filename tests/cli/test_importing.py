"""Imports without garbage collection; afterwards it is as it was."""

import gc

import pytest

from circuitscope.cli.importing import no_garbage_collection


def test_collection_is_off_meanwhile_and_on_afterwards():
    with no_garbage_collection():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_collection_is_on_again_after_an_import_that_fails():
    with pytest.raises(ImportError), no_garbage_collection():
        raise ImportError
    assert gc.isenabled()
