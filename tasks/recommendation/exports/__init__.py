"""What a published recommendation becomes where people act: files of other tools, from a row of the published copy."""
