<!doctype html><title>llamaherd</title>
